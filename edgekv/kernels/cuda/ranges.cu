// Attention through a buffer: scores of a range of tokens for the key codec KEYS, and sums of it for the value codec VALUES.

#ifdef KEYS
// s[g, m, t - t0] = score of query m with token t, for t0 <= t < t1; -inf if the query does not see the token, which stands at
// positions[g, t] (rows `position_stride` apart) or, if that is 0, at position + t - t0. From `stop` on there are no tokens. Query m is of token m % n, which sees
// the positions lo .. hi: of its own, ends (2, n), if `many`. What moves does so by the numbers at the addresses; hi, and lo unless it is 0, by the shift.
// Grid (shares of the tokens, G, queries / ROWS).
extern "C" __global__ void __launch_bounds__(THREADS)
scores(const float* q, const void* codes, const float* scale, int rows, const void* a, const void* b, const void* c,
       const void* d, const void* e, const void* f, int capacity, int t0, int t1, float* s, int group_stride, int row_stride,
       const int* positions, int position_stride, int stop, const int* stop_moves, int position, const int* position_moves,
       int n, int many, const int* ends, int lo, int hi, const int* shift)
{
    __shared__ KEYS::Shared shared;
    Queries queries = {q, codes, scale, rows};
    Store store = {a, b, c, d, e, f, capacity};
    int g = blockIdx.y, m0 = blockIdx.z * ROWS, first = t0 / TILE, tiles = divide_up(t1, TILE) - first;
    int tile = first + (i64)tiles * blockIdx.x / gridDim.x, last = first + (i64)tiles * (blockIdx.x + 1) / gridDim.x;
    int end = least(t1, last * TILE), moved = *shift;
    stop += *stop_moves, position += *position_moves;
    KEYS keys(shared, queries, store, g, m0, end);
    UNROLL for (int u = 0; u < TILES; ++u) keys.load(u, tile + u);
    for (; tile < last; tile += TILES) {
        UNROLL for (int u = 0; u < TILES; ++u) keys.scores(u, tile + u);
        __syncthreads();
        UNROLL for (int turn = 0; turn < TURNS_OF_ITEMS; ++turn) {
            int item = turn * WARPS + threadIdx.x / 32, m = item / TILES, u = item % TILES;
            if (m >= least(ROWS, rows - m0)) continue;
            float* row = s + (i64)g * group_stride + (i64)(m0 + m) * row_stride - t0;
            if (many) lo = ends[(m0 + m) % n], hi = ends[n + (m0 + m) % n];
            for (int i = threadIdx.x % 32; i < TILE; i += 32) {
                int t = (tile + u) * TILE + i;
                if (t < t0 || t >= end) continue;
                int at = position_stride ? positions[(i64)g * position_stride + t] : position + t - t0;
                bool sees = t < stop && at >= (lo > 0 ? lo + moved : lo) && at < hi + moved;
                row[t] = sees ? bounded(keys.score(u, m, i)) : MINUS_INFINITY;
            }
        }
        UNROLL for (int u = 0; u < TILES; ++u) keys.load(u, tile + TILES + u);
        __syncthreads();
    }
}
#endif

#ifdef VALUES
// partial[g, share, m] = sum over a share of the tokens t0 .. t1 of p[g, m, t - t0] * value; (G, shares, rows, D).
// Grid (shares, G, rows / ROWS).
extern "C" __global__ void __launch_bounds__(THREADS)
values(const float* p, int group_stride, int row_stride, const void* a, const void* b, const void* c,
       const void* d, const void* e, const void* f, int capacity, int t0, int t1, int rows, float* partial)
{
    __shared__ VALUES::Shared shared;
    __shared__ float out[ROWS][HEAD_DIM];
    Store store = {a, b, c, d, e, f, capacity};
    int g = blockIdx.y, m0 = blockIdx.z * ROWS, first = t0 / TILE, n = divide_up(t1, TILE) - first;
    int tile = first + (i64)n * blockIdx.x / gridDim.x, last = first + (i64)n * (blockIdx.x + 1) / gridDim.x;
    int end = least(t1, last * TILE);
    VALUES values(shared, store, g, end);
    for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += THREADS) out[i / HEAD_DIM][i % HEAD_DIM] = 0;
    UNROLL for (int u = 0; u < TILES; ++u) values.load(u, tile + u);
    for (; tile < last; tile += TILES) {
        UNROLL for (int turn = 0; turn < TURNS_OF_ITEMS; ++turn) {
            int item = turn * WARPS + threadIdx.x / 32, m = item / TILES, u = item % TILES;
            if (item >= ITEMS) break;
            const float* row = p + (i64)g * group_stride + (i64)(m0 + m) * row_stride - t0;
            float weight[2];
            UNROLL for (int i = 0; i < 2; ++i) {
                int t = (tile + u) * TILE + threadIdx.x % 32 + 32 * i;
                weight[i] = t >= t0 && t < end && m0 + m < rows ? row[t] : 0;
            }
            values.weigh(u, m, tile + u, weight[0], weight[1]);
        }
        __syncthreads();
        UNROLL for (int u = 0; u < TILES; ++u) {
            values.add(u, tile + u);
            values.load(u, tile + TILES + u);
        }
        __syncthreads();
    }
    values.finish(out);
    for (int i = threadIdx.x; i < least(ROWS, rows - m0) * HEAD_DIM; i += THREADS)
        partial[(((i64)g * gridDim.x + blockIdx.x) * rows + m0) * HEAD_DIM + i] = out[i / HEAD_DIM][i % HEAD_DIM];
}
#endif
