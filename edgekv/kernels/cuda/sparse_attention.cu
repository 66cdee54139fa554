// Attention to chosen tokens of float16 stores (G, capacity, HEAD_DIM): tokens (G, n, most);
// query token j of head g sees counts[j] of them, if `many`, else `count`. ROWS heads share a KV head.

// A warp takes a token; scores of those that are not seen are -inf. Grid (tokens / WARPS, G * n).
extern "C" __global__ void __launch_bounds__(THREADS)
scores_at(const float* q, const u16* keys, int capacity, const int* tokens, int most_tokens, int n, int many, const int* counts,
          int count, float* s, int group_stride, int row_stride)
{
    int g = blockIdx.y / n, j = blockIdx.y % n, i = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (i >= most_tokens) return;
    if (i >= (many ? counts[j] : count)) {
        if (lane < ROWS) s[(i64)g * group_stride + (i64)(lane * n + j) * row_stride + i] = MINUS_INFINITY;
        return;
    }
    const u16* key = keys + ((i64)g * capacity + tokens[(i64)blockIdx.y * most_tokens + i]) * HEAD_DIM;
    float sum[ROWS] = {};
    for (int c = lane; c < HEAD_DIM; c += 32) {
        float x = half_to_float(key[c]);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sum[r] += q[((i64)g * ROWS * n + r * n + j) * HEAD_DIM + c] * x;
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        sum[r] = lane_sum(sum[r]);
        if (lane == 0) s[(i64)g * group_stride + (i64)(r * n + j) * row_stride + i] = bounded(sum[r]);
    }
}

// partial (G, splits, ROWS * n, HEAD_DIM). Grid (splits, G * n).
extern "C" __global__ void __launch_bounds__(THREADS)
values_at(const float* p, int group_stride, int row_stride, const u16* values, int capacity, const int* tokens, int most_tokens,
          int n, int many, const int* counts, int count, float* partial)
{
    int g = blockIdx.y / n, j = blockIdx.y % n;
    if (many) count = counts[j];
    int first = (i64)count * blockIdx.x / gridDim.x, last = (i64)count * (blockIdx.x + 1) / gridDim.x;
    for (int c = threadIdx.x; c < HEAD_DIM; c += THREADS) {
        float sum[ROWS] = {};
#pragma unroll 4
        for (int i = first; i < last; ++i) {
            float x = half_to_float(values[((i64)g * capacity + tokens[(i64)blockIdx.y * most_tokens + i]) * HEAD_DIM + c]);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) sum[r] += p[(i64)g * group_stride + (i64)(r * n + j) * row_stride + i] * x;
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            partial[(((i64)g * gridDim.x + blockIdx.x) * ROWS * n + r * n + j) * HEAD_DIM + c] = sum[r];
    }
}
