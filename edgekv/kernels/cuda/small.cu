// Small kernels between the large ones: softmax of rows, sums of shares, what a recorded step is given.

// Softmax of rows, in place: of columns lo .. hi, 0 elsewhere. ends (2, rows) if `many`. A thread reads FLIGHT columns before
// it works on them.
#define FLIGHT 4

// The sum of exp(x - top) over a row's columns lo .. hi, top the largest x, 0 if there is none.
__device__ __forceinline__ float sum_of_weights(const float* row, int lo, int hi, float& top)
{
    float peak = MINUS_INFINITY, total = 0, x[FLIGHT];
    for (int first = lo; first < hi; first += FLIGHT * (int)blockDim.x) {
        float largest = peak;
#pragma unroll
        for (int k = 0; k < FLIGHT; ++k) {
            int i = first + k * (int)blockDim.x + threadIdx.x;
            x[k] = i < hi ? row[i] : MINUS_INFINITY;
        }
#pragma unroll
        for (int k = 0; k < FLIGHT; ++k) largest = fmaxf(largest, x[k]);
        if (largest == MINUS_INFINITY) continue;
        total *= expf(peak - largest);
#pragma unroll
        for (int k = 0; k < FLIGHT; ++k) total += expf(x[k] - largest);
        peak = largest;
    }
    top = block_max(peak);
    if (top == MINUS_INFINITY) top = 0;
    return block_sum(total * expf(peak - top));
}

extern "C" __global__ void __launch_bounds__(1024)
softmax(float* s, int group_stride, int row_stride, int columns, int rows, int many, const int* ends, int lo, int hi)
{
    int m = blockIdx.x;
    float* row = s + (i64)blockIdx.y * group_stride + (i64)m * row_stride;
    if (many) lo = ends[m], hi = ends[rows + m];
    float x[FLIGHT], top, total = sum_of_weights(row, lo, hi, top);
    float factor = total > 0 ? 1 / total : 0;
    for (int first = 0; first < columns; first += FLIGHT * (int)blockDim.x) {
#pragma unroll
        for (int k = 0; k < FLIGHT; ++k) {
            int i = first + k * (int)blockDim.x + threadIdx.x;
            x[k] = i >= lo && i < hi ? row[i] : MINUS_INFINITY;
        }
#pragma unroll
        for (int k = 0; k < FLIGHT; ++k) {
            int i = first + k * (int)blockDim.x + threadIdx.x;
            if (i < columns) row[i] = expf(x[k] - top) * factor;
        }
    }
}

// out[i] += sum over the splits of partial (G, splits, row), i over (G, row).
extern "C" __global__ void add_partial(const float* partial, int splits, int row, int n, float* out)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float* from = partial + (i64)(i / row) * splits * row + i % row;
    float sum = 0;
    for (int k = 0; k < splits; ++k) sum += from[(i64)k * row];
    out[i] += sum;
}

// Attention over several sets of tokens from that over each: a set weighs as its part of the sum of all weights.

// out (rows, d) = the weighted sum of parts (n, rows, d). ends (n, rows, 2): the maximum of a part, the sum of its weights.
// Grid (rows).
extern "C" __global__ void merge(const float* parts, const float* ends, int n, int d, float* out)
{
    i64 row = blockIdx.x, rows = gridDim.x;
    float peak = MINUS_INFINITY, total = 0;
    for (int i = 0; i < n; ++i)
        if (ends[(i * rows + row) * 2 + 1] > 0) peak = fmaxf(peak, ends[(i * rows + row) * 2]);
    for (int i = 0; i < n; ++i) {
        const float* end = ends + (i * rows + row) * 2;
        total += end[1] > 0 ? expf(end[0] - peak) * end[1] : 0;
    }
    float factor = total > 0 ? 1 / total : 0;
    for (int c = threadIdx.x; c < d; c += blockDim.x) {
        float sum = 0;
        for (int i = 0; i < n; ++i) {
            const float* end = ends + (i * rows + row) * 2;
            if (end[1] > 0) sum += expf(end[0] - peak) * end[1] * factor * parts[(i * rows + row) * d + c];
        }
        out[row * d + c] = sum;
    }
}

// What a recorded step is given: the token, and by how much its counters have moved since it was recorded (counter.py).
extern "C" __global__ void set_inputs(int* ids, int token, int* moves, int m0, int m1, int m2, int m3, int m4, int m5, int m6,
                                      int m7, int m8, int m9, int m10, int m11, int m12, int m13, int m14)
{
    ids[0] = token;
    moves[0] = m0, moves[1] = m1, moves[2] = m2, moves[3] = m3, moves[4] = m4, moves[5] = m5, moves[6] = m6, moves[7] = m7;
    moves[8] = m8, moves[9] = m9, moves[10] = m10, moves[11] = m11, moves[12] = m12, moves[13] = m13, moves[14] = m14;
}
