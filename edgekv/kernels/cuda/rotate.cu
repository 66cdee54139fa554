// The Walsh-Hadamard transform of rows, one block each, WIDTH / 2 threads: `hadamard`, `hadamard_back`.

// Transforms x (WIDTH) in shared memory, pairs WIDTH / 2 apart in every pass; returns where the result is.
__device__ float* transform(float (*x)[WIDTH])
{
    int side = 0, i = threadIdx.x;
    for (int n = 1; n < WIDTH; n *= 2, side ^= 1) {
        __syncthreads();
        float a = x[side][i], b = x[side][i + WIDTH / 2];
        x[side ^ 1][2 * i] = a + b;
        x[side ^ 1][2 * i + 1] = a - b;
    }
    __syncthreads();
    return x[side];
}

extern "C" __global__ void hadamard(const float* x, int n, int stride, int d, const float* flips, float factor, float* out)
{
    __shared__ float rows[2][WIDTH];
    const float* from = x + (i64)(blockIdx.x / n) * stride + (i64)(blockIdx.x % n) * d;
    for (int c = threadIdx.x; c < WIDTH; c += WIDTH / 2) rows[0][c] = c < d ? from[c] * flips[c] : 0;
    float* result = transform(rows);
    for (int c = threadIdx.x; c < WIDTH; c += WIDTH / 2) out[(i64)blockIdx.x * WIDTH + c] = result[c] * factor;
}

extern "C" __global__ void hadamard_back(const float* x, int n, int stride, int d, const float* flips, float factor, float* out)
{
    __shared__ float rows[2][WIDTH];
    for (int c = threadIdx.x; c < WIDTH; c += WIDTH / 2) rows[0][c] = x[(i64)blockIdx.x * WIDTH + c];
    float* result = transform(rows);
    float* to = out + (i64)(blockIdx.x / n) * stride + (i64)(blockIdx.x % n) * d;
    for (int c = threadIdx.x; c < d; c += WIDTH / 2) to[c] += result[c] * factor * flips[c];
}
