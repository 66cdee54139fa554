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
