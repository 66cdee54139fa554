// Attention through a buffer of scores: those of a range of tokens of the key codec KEYS, and sums over values of the codec VALUES.

#ifdef KEYS
// Sets scores[g, m, t - segment.first] to the score of query m with token t, for `columns` tokens; to -inf if the query does not
// see the token, which stands at positions[g, t] (rows `position_stride` apart) or, without these, follows its neighbour. From
// segment.stop on there are no tokens. Grid (splits of the tokens, G, queries / ROWS).
extern "C" __global__ void __launch_bounds__(THREADS)
scores(const Queries queries, const Segment segment, Scores scores, int columns, const int* positions, int position_stride,
       const Visible visible)
{
    __shared__ KEYS::Shared shared;
    int g = blockIdx.y, m0 = blockIdx.z * ROWS, rows = queries.rows, t0 = segment.first, t1 = t0 + columns;
    int first_tile = t0 / TILE, n_tiles = divide_up(t1, TILE) - first_tile, stop = segment.stop.now(), position = segment.position.now();
    int tile = first_tile + (i64)n_tiles * blockIdx.x / gridDim.x, end_tile = first_tile + (i64)n_tiles * (blockIdx.x + 1) / gridDim.x;
    int end = min_of(t1, end_tile * TILE), delta = *visible.position_delta, lo = visible.lo, hi = visible.hi;
    KEYS keys(shared, queries, segment.keys, g, m0, end);
    UNROLL for (int u = 0; u < TILES; ++u) keys.load(u, tile + u);
    for (; tile < end_tile; tile += TILES) {
        UNROLL for (int u = 0; u < TILES; ++u) keys.scores(u, tile + u);
        __syncthreads();
        UNROLL for (int turn = 0; turn < ITEMS_PER_WARP; ++turn) {
            int item = turn * WARPS + threadIdx.x / 32, m = item / TILES, u = item % TILES;
            if (m >= min_of(ROWS, rows - m0)) continue;
            float* row = scores.row(g, m0 + m) - t0;
            if (visible.limits) lo = visible.limits[m0 + m], hi = visible.limits[rows + m0 + m];
            for (int i = threadIdx.x % 32; i < TILE; i += 32) {
                int t = (tile + u) * TILE + i;
                if (t < t0 || t >= end) continue;
                int at = positions ? positions[(i64)g * position_stride + t] : position + t - t0;
                bool sees = t < stop && at >= (lo > 0 ? lo + delta : lo) && at < hi + delta;
                row[t] = sees ? capped(keys.score(u, m, i)) : MINUS_INFINITY;
            }
        }
        UNROLL for (int u = 0; u < TILES; ++u) keys.load(u, tile + TILES + u);
        __syncthreads();
    }
}
#endif

#ifdef VALUES
// Sets partial[g, split, m] (G, splits, rows, HEAD_DIM) to the sum over a split of the tokens t0 .. t1 of p[g, m, t - t0] * value.
// Grid (splits, G, rows / ROWS).
extern "C" __global__ void __launch_bounds__(THREADS)
values(const Scores p, const Store store, int t0, int t1, int rows, float* partial)
{
    __shared__ VALUES::Shared shared;
    __shared__ float out[ROWS][HEAD_DIM];
    int g = blockIdx.y, m0 = blockIdx.z * ROWS, first_tile = t0 / TILE, n_tiles = divide_up(t1, TILE) - first_tile;
    int tile = first_tile + (i64)n_tiles * blockIdx.x / gridDim.x, end_tile = first_tile + (i64)n_tiles * (blockIdx.x + 1) / gridDim.x;
    int end = min_of(t1, end_tile * TILE);
    VALUES values(shared, store, g, end);
    for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += THREADS) out[i / HEAD_DIM][i % HEAD_DIM] = 0;
    UNROLL for (int u = 0; u < TILES; ++u) values.load(u, tile + u);
    for (; tile < end_tile; tile += TILES) {
        UNROLL for (int turn = 0; turn < ITEMS_PER_WARP; ++turn) {
            int item = turn * WARPS + threadIdx.x / 32, m = item / TILES, u = item % TILES;
            if (item >= ITEMS) break;
            const float* row = p.row(g, m0 + m) - t0;
            float weight[2];
            UNROLL for (int i = 0; i < 2; ++i) {
                int t = (tile + u) * TILE + threadIdx.x % 32 + 32 * i;
                weight[i] = t >= t0 && t < end && m0 + m < rows ? row[t] : 0;
            }
            values.set_weights(u, m, tile + u, weight[0], weight[1]);
        }
        __syncthreads();
        UNROLL for (int u = 0; u < TILES; ++u) {
            values.add(u, tile + u);
            values.load(u, tile + TILES + u);
        }
        __syncthreads();
    }
    values.finish(out);
    for (int i = threadIdx.x; i < min_of(ROWS, rows - m0) * HEAD_DIM; i += THREADS)
        partial[(((i64)g * gridDim.x + blockIdx.x) * rows + m0) * HEAD_DIM + i] = out[i / HEAD_DIM][i % HEAD_DIM];
}
#endif
