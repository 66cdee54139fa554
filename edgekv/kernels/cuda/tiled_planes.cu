// A share of attention over keys in planes (as CentredKeys reads them) and interleaved values, on tensor cores from sm_80 on;
// KEY_DIM = HEAD_DIM, 64 or 128. A warp goes by itself, two tiles of 64 tokens at a time. Signs are multiplied as bits, with
// the bits of the queries' whole numbers; centres and values as bytes, with queries of 16 bits and weights of 8.
//
// Lane 4 i + j, in steps: of keys it reads the columns j, j + 4 .. of group i % 4 of tile i / 4, and is left with the scores
// of that tile's tokens 16 j + 4 (i % 4) .. + 3; of centres row i of both tiles; of values the channels 32 y + 4 i .. + 3.
// In sums over values columns of the second factor are: a row of queries, a tile, and the lower or upper half of the codes.
//
// Behind tiled_queries, tiled_warp, tiled_scores and tiled_values.

// All reads begin at one place: what waits for some of a warp's reads waits for all of them.
__device__ __forceinline__ void TiledWarp::step(int tile)
{
    int product[ROWS][4];
    float near[SETS][2], key_widths[4], value_widths[4], s[ROWS][4];
    multiply_signs(product);
#pragma unroll
    for (int set = 0; set < SETS; ++set) multiply_centres(set, near[set]);
    unpack(key_width, key_widths), unpack(value_width, value_widths);
    load_values(0, tile), load_values(1, tile);
    load_keys(tile + 2);
    load_scales(tile + 2);
    scores(tile, product, near, key_widths, s);
    weigh(s, value_widths);
    if (TOGETHER)
        add(0, 2);
    else
        add(0, 1), add(1, 1);
}

// Leaves what this warp has found to the block.
__device__ void TiledWarp::finish()
{
#pragma unroll
    for (int set = 0; set < SETS; ++set)
#pragma unroll
        for (int y = 0; y < WIDE; ++y)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                float x = sum[set][y][k / 2][k % 2];
                if (TOGETHER) x += __shfl_xor_sync(EVERY_LANE, x, 1);
                int m = TOGETHER ? j / 2 : 4 * set + j;
                if (m < ROWS && (!TOGETHER || j % 2 == 0)) shared.parts[warp][m][32 * y + 4 * i + k] = x;
            }
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
        float all = lane_sum(total[m]), added = lane_sum(offset[m]) * (-0.5f * ((1 << value_bits) - 1));
        if (threadIdx.x % 32 == 0) shared.peaks[warp][m] = peak[m], shared.totals[warp][m] = all, shared.offsets[warp][m] = added;
    }
}

// As attend_share; queries as they come from the model, queries.codes (G, HEAD_DIM) the rotation's signs times factors
// of the channels, queries.scale (G) a factor of the keys' estimates.
__device__ void tiled_share(TiledShared& shared, const Queries& queries, const Store& keys, const Store& values, const Span& span,
                            int part, int parts, int g, float* ends, float (*out)[HEAD_DIM])
{
    int first = span.t0 / TILE, n = divide_up(span.t1, TILE) - first;
    int begin = first + (i64)n * part / parts, end = first + (i64)n * (part + 1) / parts, warp = threadIdx.x / 32;
    int tile = begin + (end - begin) * warp / WARPS, last = begin + (end - begin) * (warp + 1) / WARPS;
    TiledWarp mine(shared, keys, values, span, last, g);
    mine.load_keys(tile);
    mine.load_scales(tile);
    wait_for_inputs();  // what is packed was there before this token
    for (int base = 0; base < ROWS; base += ROWS_TURNED) {
        for (int k = threadIdx.x; k < ROWS_TURNED * HEAD_DIM; k += THREADS) {
            int m = base + k / HEAD_DIM, c = k % HEAD_DIM;
            const float* x = queries.x + ((i64)g * ROWS + m) * HEAD_DIM;
            shared.turned[k / HEAD_DIM][0][c] = m < ROWS ? x[c] * ((const float*)queries.codes)[g * HEAD_DIM + c] : 0;
        }
        int side = turn_rows(shared.turned);
        for (int m = base + warp; m < least(ROWS, base + ROWS_TURNED); m += WARPS)
            round_row(shared, shared.turned[m - base][side], m, queries.scale[g]);
        __syncthreads();
    }
    mine.take_queries();
    for (; tile < last; tile += 2) mine.step(tile);
    mine.finish();
    __syncthreads();
    for (int k = threadIdx.x; k < ROWS * HEAD_DIM; k += THREADS) {
        int m = k / HEAD_DIM, c = k % HEAD_DIM;
        float peak = MINUS_INFINITY, total = 0, x = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) peak = fmaxf(peak, shared.peaks[w][m]);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            float factor = __expf(shared.peaks[w][m] - (peak == MINUS_INFINITY ? 0 : peak));
            total += factor * shared.totals[w][m], x += factor * (shared.parts[w][m][c] + shared.offsets[w][m]);
        }
        out[m][c] = x;
        if (c == 0) ends[2 * m] = peak, ends[2 * m + 1] = total;
    }
    __syncthreads();
}
