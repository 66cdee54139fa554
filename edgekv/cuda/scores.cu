// Scores of queries with a range of tokens, for the key codec KEYS.
// s[g, m, s0 + t - t0] = score of query m with token t, for tiles of t0 .. t1.
extern "C" __global__ void __launch_bounds__(THREADS)
scores(const float* q, const void* codes, const float* scale, int rows, const void* a, const void* b, const void* c,
       const void* d, const void* e, const void* f, int capacity, int t0, int t1, float* s, int group_stride, int row_stride, int s0)
{
    __shared__ KEYS::Shared shared;
    Queries queries = {q, codes, scale, rows};
    Store store = {a, b, c, d, e, f, capacity};
    int g = blockIdx.y, m0 = blockIdx.z * ROWS, first = t0 / TILE, n = divide_up(t1, TILE) - first;
    int tile = first + (i64)n * blockIdx.x / gridDim.x, last = first + (i64)n * (blockIdx.x + 1) / gridDim.x;
    KEYS keys(shared, queries, store, g, m0, t1);
    keys.load(tile);
    for (; tile < last; ++tile) {
        keys.scores(tile);
        __syncthreads();
        for (int m = threadIdx.x / 32; m < least(ROWS, rows - m0); m += WARPS)
            for (int i = threadIdx.x % 32; i < TILE; i += 32) {
                int t = tile * TILE + i;
                if (t >= t0 && t < t1) s[(i64)g * group_stride + (i64)(m0 + m) * row_stride + s0 + t - t0] = keys.score(m, i);
            }
        if (tile + 1 < last) keys.load(tile + 1);
        __syncthreads();
    }
}
