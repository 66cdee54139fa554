// Scores of queries with a range of tokens, for the key codec KEYS.

// s[g, m, s0 + t - t0] = score of query m with token t, for t0 <= t < t1. Grid (shares of the tokens, G, queries / ROWS).
extern "C" __global__ void __launch_bounds__(THREADS)
scores(const float* q, const void* codes, const float* scale, int rows, const void* a, const void* b, const void* c,
       const void* d, const void* e, const void* f, int capacity, int t0, int t1, float* s, int group_stride, int row_stride, int s0)
{
    __shared__ KEYS::Shared shared;
    Queries queries = {q, codes, scale, rows};
    Store store = {a, b, c, d, e, f, capacity};
    int g = blockIdx.y, m0 = blockIdx.z * ROWS, first = t0 / TILE, n = divide_up(t1, TILE) - first;
    int tile = first + (i64)n * blockIdx.x / gridDim.x, last = first + (i64)n * (blockIdx.x + 1) / gridDim.x;
    int end = least(t1, last * TILE);
    KEYS keys(shared, queries, store, g, m0, end);
#pragma unroll
    for (int u = 0; u < TILES; ++u) keys.load(u, tile + u);
    for (; tile < last; tile += TILES) {
        if (KEYS::PREPARES) {
            keys.prepare(tile);
            __syncthreads();
        }
#pragma unroll
        for (int u = 0; u < TILES; ++u) keys.scores(u, tile + u);
        __syncthreads();
#pragma unroll
        for (int turn = 0; turn < TURNS_OF_ITEMS; ++turn) {
            int item = turn * WARPS + threadIdx.x / 32, m = item / TILES, u = item % TILES;
            if (m >= least(ROWS, rows - m0)) continue;
            float* row = s + (i64)g * group_stride + (i64)(m0 + m) * row_stride + s0 - t0;
            for (int i = threadIdx.x % 32; i < TILE; i += 32) {
                int t = (tile + u) * TILE + i;
                if (t >= t0 && t < end) row[t] = keys.score(u, m, i);
            }
        }
#pragma unroll
        for (int u = 0; u < TILES; ++u) keys.load(u, tile + TILES + u);
        __syncthreads();
    }
}
