// Attention in one launch, over a pair of codecs KEYS and VALUES and, beside it, float16 tokens. Each thread block takes the softmax
// over a split of the tokens: a running maximum, the sum of the weights, the weighted values. A KV head's last one combines the splits.

// Attends to one of n_splits splits of the tokens: out (ROWS, HEAD_DIM) is the weighted sum of values, softmax (ROWS, 2) the maximum of
// the scores and the sum of the weights.
template <class K, class V>
__device__ void attend_split(const Queries& queries, const Store& key_store, const Store& value_store, const Span& span,
                             int split, int n_splits, int g, float* softmax, float (*out)[HEAD_DIM])
{
    __shared__ typename K::Shared key_shared;
    __shared__ typename V::Shared value_shared;
    __shared__ float tile_max[ROWS][TILES], factor[ROWS], row_sums[WARPS][ROWS];
    int first_tile = span.t0 / TILE, n_tiles = divide_up(span.t1, TILE) - first_tile;
    int tile = first_tile + (i64)n_tiles * split / n_splits, end_tile = first_tile + (i64)n_tiles * (split + 1) / n_splits;
    int end = min_of(span.t1, end_tile * TILE), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    K keys(key_shared, queries, key_store, g, 0, end);
    V values(value_shared, value_store, g, end);
    float running_max[ITEMS_PER_WARP], running_sum[ITEMS_PER_WARP];  // of the rows of this warp's items
    UNROLL for (int i = 0; i < ITEMS_PER_WARP; ++i) running_max[i] = MINUS_INFINITY, running_sum[i] = 0;
    UNROLL for (int u = 0; u < TILES; ++u) keys.load(u, tile + u);
    UNROLL for (int u = 0; u < TILES; ++u) values.load(u, tile + u);
    for (; tile < end_tile; tile += TILES) {
        UNROLL for (int u = 0; u < TILES; ++u)
            if (tile + u < end_tile) keys.scores(u, tile + u);
        __syncthreads();
        float s[ITEMS_PER_WARP][2];
        UNROLL for (int i = 0; i < ITEMS_PER_WARP; ++i) {
            int item = i * WARPS + warp, m = item / TILES, u = item % TILES;
            if (item >= ITEMS) break;
            UNROLL for (int j = 0; j < 2; ++j) {
                int t = (tile + u) * TILE + lane + 32 * j;
                s[i][j] = t < end && span.sees(t) ? capped(keys.score(u, m, lane + 32 * j)) : MINUS_INFINITY;
            }
            float largest = lane_max(fmaxf(s[i][0], s[i][1]));
            if (lane == 0) tile_max[m][u] = largest;
        }
        UNROLL for (int u = 0; u < TILES; ++u) keys.load(u, tile + TILES + u);
        if (TILES > 1) __syncthreads();  // else a row's only item is its own warp's
        else __syncwarp();
        UNROLL for (int i = 0; i < ITEMS_PER_WARP; ++i) {
            int item = i * WARPS + warp, m = item / TILES, u = item % TILES;
            if (item >= ITEMS) break;
            float largest = running_max[i];
            UNROLL for (int v = 0; v < TILES; ++v) largest = fmaxf(largest, tile_max[m][v]);
            float base = largest == MINUS_INFINITY ? 0 : largest;
            float p0 = __expf(s[i][0] - base), p1 = __expf(s[i][1] - base), rescale = __expf(running_max[i] - base);
            running_max[i] = largest;
            running_sum[i] = running_sum[i] * rescale + p0 + p1;
            if (lane == 0 && u == 0) factor[m] = rescale;
            values.set_weights(u, m, tile + u, p0, p1);
        }
        __syncthreads();
        UNROLL for (int m = 0; m < ROWS; ++m)
            if (factor[m] != 1) values.rescale(m, factor[m]);
        UNROLL for (int u = 0; u < TILES; ++u) {
            if (tile + u < end_tile) values.add(u, tile + u);
            values.load(u, tile + TILES + u);
        }
    }
    UNROLL for (int i = 0; i < ITEMS_PER_WARP; ++i) {
        int item = i * WARPS + warp;
        if (item < ITEMS && item % TILES == 0 && lane == 0) softmax[2 * (item / TILES)] = running_max[i];
    }
    add_by_row<TILES>(running_sum, row_sums);
    for (int m = threadIdx.x; m < ROWS; m += THREADS) {
        float sum = 0;
        for (int i = 0; i < WARPS; ++i) sum += row_sums[i][m];
        softmax[2 * m + 1] = sum;
    }
    values.finish(out);
}

// Sets out[m, :] to the sum of the splits from .. to of row m, each times its weight; a warp takes every fourth split.
__device__ void add_splits(const float* sums, const float (*weights)[ROWS], int from, int to, float* out)
{
    __shared__ float sum[WARPS][HEAD_DIM];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int m = 0; m < ROWS; ++m) {
        float x[divide_up(HEAD_DIM, 32)] = {};
#pragma unroll 4
        for (int i = from + warp; i < to; i += WARPS)
            UNROLL for (int k = 0; k < divide_up(HEAD_DIM, 32); ++k) {
                int c = lane + 32 * k;
                if (c < HEAD_DIM) x[k] += weights[i][m] * __ldcg(&sums[((i64)i * ROWS + m) * HEAD_DIM + c]);
            }
        UNROLL for (int k = 0; k < divide_up(HEAD_DIM, 32); ++k)
            if (lane + 32 * k < HEAD_DIM) sum[warp][lane + 32 * k] = x[k];
        __syncthreads();
        for (int c = threadIdx.x; c < HEAD_DIM; c += THREADS) {
            float total = 0;
            for (int i = 0; i < WARPS; ++i) total += sum[i][c];
            out[m * HEAD_DIM + c] = total;
        }
        __syncthreads();
    }
}

// The first splits are those of the tokens of `pair`, then come exact1's and exact2's, float16 both.
struct AttendArgs {
    Queries queries;              // for `pair`
    const float* exact_queries;   // (G, ROWS, HEAD_DIM)
    Segment pair, exact1, exact2;
    Visible visible;
    float *split_softmax, *split_sums;  // each split's: (G, splits, ROWS, 2) as `softmax`, (G, splits, ROWS, HEAD_DIM)
    u32* done;                          // splits that are done (G): zeros, left so
    float* softmax;                     // (G, ROWS, 2): the maximum of all scores and the sum of all weights
    float *out, *exact_out;  // (G, ROWS, HEAD_DIM): the pair's part and the exact tokens' part; or one array, for their sum
};

#ifndef BLOCKS_AT_ONCE
#define BLOCKS_AT_ONCE (ROWS > 1 ? 2 : __CUDA_ARCH__ < 700 ? 3 : 4)  // on a multiprocessor: limits a thread's registers
#endif
#ifdef TILED
#define EXACT_IN_FLIGHT 8
#else
#define EXACT_IN_FLIGHT (ROWS == 1 ? 32 : 16)
#endif
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AT_ONCE) attend(const AttendArgs args)
{
    __shared__ float out[ROWS][HEAD_DIM];
    __shared__ bool is_last;
#ifdef TILED
    __shared__ TiledShared tiled;
#endif
    int g = blockIdx.y, split = blockIdx.x, n_splits = gridDim.x, pair_splits = args.pair.n_splits;
    launch_dependents();
#ifdef TILED
    // The splits of packed tokens wait later, in tiled_split: below, counters are read before the launches ahead are done. That is
    // right only while no launch that lets the next one begin early (launch_dependents) advances these counters.
    if (split >= pair_splits) grid_dependency_wait();
#else
    grid_dependency_wait();
#endif
    float* softmax = args.split_softmax + ((i64)g * n_splits + split) * ROWS * 2;
    int delta = *args.visible.position_delta, hi = args.visible.hi + delta, lo = args.visible.lo + (args.visible.lo > 0 ? delta : 0);
    for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += THREADS) out[i / HEAD_DIM][i % HEAD_DIM] = 0;
    if (split < pair_splits) {
        const Segment& pair = args.pair;
        Span span = {pair.first, pair.stop.now(), pair.position.now(), lo, hi};
#ifdef TILED
        tiled_split(tiled, args.queries, pair.keys, pair.values, span, split, pair_splits, g, softmax, out);
#else
        attend_split<KEYS, VALUES>(args.queries, pair.keys, pair.values, span, split, pair_splits, g, softmax, out);
#endif
    } else {
#ifdef EXACT
        int exact2_start = pair_splits + args.exact1.n_splits;
        bool is_exact2 = split >= exact2_start;
        Segment exact = args.exact1;
        if (is_exact2) exact = args.exact2;
        exact.values.capacity = exact.keys.capacity;  // as they are: a register less
        int exact_split = is_exact2 ? split - exact2_start : split - pair_splits;
        Queries queries = {args.exact_queries, 0, 0, ROWS};
        Span span = {exact.first, exact.stop.now(), exact.position.now(), lo, hi};
        attend_split<RowKeys<Numbers<u16>, EXACT_IN_FLIGHT, 1>, RowValues<Numbers<u16>, EXACT_IN_FLIGHT, 1>>(
            queries, exact.keys, exact.values, span, exact_split, exact.n_splits, g, softmax, out);
#endif
    }
    const float* softmaxes = args.split_softmax + (i64)g * n_splits * ROWS * 2;
    float* sums = args.split_sums + (i64)g * n_splits * ROWS * HEAD_DIM;
    for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += THREADS) sums[(i64)split * ROWS * HEAD_DIM + i] = out[i / HEAD_DIM][i % HEAD_DIM];
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicInc(&args.done[g], n_splits - 1) == (u32)n_splits - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    __shared__ float weights[MAX_SPLITS][ROWS];
    for (int m = threadIdx.x / 32; m < ROWS; m += WARPS) {
        float largest = MINUS_INFINITY, total = 0;
        for (int i = threadIdx.x % 32; i < n_splits; i += 32) largest = fmaxf(largest, __ldcg(&softmaxes[(i * ROWS + m) * 2]));
        largest = lane_max(largest);
        if (largest == MINUS_INFINITY) largest = 0;
        for (int i = threadIdx.x % 32; i < n_splits; i += 32) {
            weights[i][m] = expf(__ldcg(&softmaxes[(i * ROWS + m) * 2]) - largest);
            total += weights[i][m] * __ldcg(&softmaxes[(i * ROWS + m) * 2 + 1]);
        }
        total = lane_sum(total);
        for (int i = threadIdx.x % 32; i < n_splits; i += 32) weights[i][m] *= total > 0 ? 1 / total : 0;
        if (threadIdx.x % 32 == 0) {
            args.softmax[((i64)g * ROWS + m) * 2] = largest;
            args.softmax[((i64)g * ROWS + m) * 2 + 1] = total;
        }
    }
    __syncthreads();
    float *pair_out = args.out + (i64)g * ROWS * HEAD_DIM, *exact_out = args.exact_out + (i64)g * ROWS * HEAD_DIM;
#ifdef TILED
    add_splits(sums, weights, pair_splits, n_splits, exact_out);
    add_splits(sums, weights, 0, pair_splits, out[0]);
    rotate_back(tiled, out, (const float*)args.pair.values.d, exact_out);
#else
    bool together = pair_out == exact_out;
    add_splits(sums, weights, 0, together ? n_splits : pair_splits, pair_out);
    if (!together) add_splits(sums, weights, pair_splits, n_splits, exact_out);
#endif
}
