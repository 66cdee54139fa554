// Softmax of rows, in place: of columns lo .. hi, which move with the shift; 0 elsewhere. ends (2, rows) if `many`.
extern "C" __global__ void __launch_bounds__(256)
softmax(float* s, int group_stride, int row_stride, int columns, int rows, int many, const int* ends, int lo, int hi,
        const int* shift)
{
    int m = blockIdx.x;
    float* row = s + (i64)blockIdx.y * group_stride + (i64)m * row_stride;
    if (many) lo = ends[m], hi = ends[rows + m];
    hi += *shift;
    float peak = MINUS_INFINITY;
    for (int i = lo + threadIdx.x; i < hi; i += blockDim.x) peak = fmaxf(peak, row[i]);
    peak = block_max(peak);
    if (peak == MINUS_INFINITY) peak = 0;
    float total = 0;
    for (int i = lo + threadIdx.x; i < hi; i += blockDim.x) {
        float weight = expf(row[i] - peak);
        row[i] = weight;
        total += weight;
    }
    total = block_sum(total);
    float factor = total > 0 ? 1 / total : 0;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) row[i] = i >= lo && i < hi ? row[i] * factor : 0;
}
