// Kernels that round as edgekv.kernels.reference does, to the bit: scales, encoders, rotations.

#define MAX_HALF 65504.0f

// Returns the smallest float16 not below x >= 0, or the largest one.
__device__ __forceinline__ u16 half_above(float x)
{
    x = fminf(x, MAX_HALF);
    u16 half = float_to_half(x);
    return half + (half_to_float(half) < x);
}

// Returns the nearest finite float16 of x >= 0.
__device__ __forceinline__ u16 half_of(double x) { return float_to_half((float)fmin(x, 65504.0)); }

// Encoders of numbers and symmetric integers. x (G, n, D) has its heads `stride` apart, its tokens D.

// Stores tokens as float16 (`halves`) or float32. Grid (n, G).
extern "C" __global__ void encode(const float* x, int stride, int d, void* store, int halves, int capacity, Counter t0)
{
    const float* from = x + (i64)blockIdx.y * stride + (i64)blockIdx.x * d;
    i64 to = ((i64)blockIdx.y * capacity + t0.now() + blockIdx.x) * d;
    for (int c = threadIdx.x; c < d; c += blockDim.x)
        if (halves)
            ((u16*)store)[to + c] = float_to_half(from[c]);
        else
            ((float*)store)[to + c] = from[c];
}

// Stores symmetric codes: signed bytes, or 4 bits plus 8. Grid (n, G), a warp each.
extern "C" __global__ void encode_sym(const float* x, int stride, int d, int bits, u8* codes, u16* scale, int capacity,
                                      Counter t0)
{
    const float* from = x + (i64)blockIdx.y * stride + (i64)blockIdx.x * d;
    int t = t0.now() + blockIdx.x, top = (1 << (bits - 1)) - 1, n_bytes = d * bits / 8;
    float largest = 0;
    for (int c = threadIdx.x; c < d; c += 32) largest = fmaxf(largest, fabsf(from[c]));
    u16 half = half_above(lane_max(largest) / (float)top);
    float step = half_to_float(half);
    if (step == 0) step = 1;
    if (threadIdx.x == 0) scale[(i64)blockIdx.y * capacity + t] = half;
    u8* to = codes + ((i64)blockIdx.y * capacity + t) * n_bytes;
    for (int j = threadIdx.x; j < n_bytes; j += 32) {
        u32 byte = 0;
        for (int part = 0; part < 8 / bits; ++part) {
            float level = rintf(from[j + part * n_bytes] / step);
            byte |= (u32)(int)(fminf(fmaxf(level, -(float)top), (float)top) + (bits == 8 ? 0 : 8)) << part * bits;
        }
        to[j] = (u8)byte;
    }
}

#ifdef WIDTH
// The Walsh-Hadamard rotation of rows, a block of WIDTH / 2 threads each: out is set to it, or gets its inverse added.

extern "C" __global__ void hadamard(const float* x, int n, int stride, int d, const float* flips, float factor, float* out)
{
    __shared__ float rows[1][2][WIDTH];
    const float* from = x + (i64)(blockIdx.x / n) * stride + (i64)(blockIdx.x % n) * d;
    for (int c = threadIdx.x; c < WIDTH; c += WIDTH / 2) rows[0][0][c] = c < d ? from[c] * flips[c] : 0;
    float* result = rows[0][walsh_hadamard(rows)];
    for (int c = threadIdx.x; c < WIDTH; c += WIDTH / 2) out[(i64)blockIdx.x * WIDTH + c] = result[c] * factor;
}

extern "C" __global__ void hadamard_back(const float* x, int n, int stride, int d, const float* flips, float factor, float* out)
{
    __shared__ float rows[1][2][WIDTH];
    for (int c = threadIdx.x; c < WIDTH; c += WIDTH / 2) rows[0][0][c] = x[(i64)blockIdx.x * WIDTH + c];
    float* result = rows[0][walsh_hadamard(rows)];
    float* to = out + (i64)(blockIdx.x / n) * stride + (i64)(blockIdx.x % n) * d;
    for (int c = threadIdx.x; c < d; c += WIDTH / 2) to[c] += result[c] * factor * flips[c];
}
#endif
