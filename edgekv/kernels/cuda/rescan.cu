// Which tiles of a segment are scanned, by estimates that are read of all tokens.

// sampled[tile] = 1 for the tiles on which deviations are measured, else 0: MOST_SAMPLES of the whole ones up to token `stop`,
// evenly apart, of `tiles` that begin with the one of token t0. Grid (tiles / THREADS).
extern "C" __global__ void __launch_bounds__(THREADS)
sample_tiles(int t0, int stop, const int* stop_moves, int tiles, u8* sampled)
{
    int tile = blockIdx.x * THREADS + threadIdx.x, start = divide_up(t0, TILE), whole = (stop + *stop_moves) / TILE - start;
    if (tile >= tiles) return;
    bool is_sampled = false;
    for (int i = 0; i < least(MOST_SAMPLES, whole); ++i)
        is_sampled = is_sampled || start + i * whole / least(MOST_SAMPLES, whole) - t0 / TILE == tile;
    sampled[tile] = is_sampled;
}

// lengths (G, rows) = those of the queries q (G, rows, KEY_DIM), times how much farther than their centres' deviations the
// scores s (G, rows, tokens from t0 on) of sampled tiles lie. Grid (rows, G).
extern "C" __global__ void __launch_bounds__(THREADS)
measure(const float* s, int group_stride, int row_stride, int t0, const u8* sampled, int tiles, const float* q, const u8* centres,
        const u16* steps, const u16* deviations, int capacity, const float* key_scale, float* lengths)
{
    int g = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32, bytes = KEY_DIM / 2;
    i64 row = (i64)g * gridDim.x + blockIdx.x;
    const float *x = q + row * KEY_DIM, *own = s + (i64)g * group_stride + (i64)blockIdx.x * row_stride - t0;
    float part = 0, found = 0, expected = 0;
    for (int c = threadIdx.x; c < KEY_DIM; c += THREADS) part += x[c] * x[c];
    float length = sqrtf(block_sum(part));
    for (int tile = warp; tile < tiles; tile += WARPS) {
        if (!sampled[tile]) continue;
        i64 block = (i64)g * (capacity / TILE) + t0 / TILE + tile;
        float common = 0, each[CENTRES - 1] = {};
        for (int i = lane; i < bytes; i += 32)
            for (int k = 0; k < CENTRES; ++k) {
                u8 code = centres[(block * CENTRES + k) * bytes + i];
                float product = (x[i] * ((float)(code & 15) - 7.5f) + x[i + bytes] * ((float)(code >> 4) - 7.5f)) * half_to_float(steps[block * CENTRES + k]);
                if (k == 0) common += product;
                else each[k - 1] += product;
            }
        common = lane_sum(common);
        for (int k = 0; k < CENTRES - 1; ++k) each[k] = lane_sum(each[k]) + common;
        for (int i = lane; i < TILE; i += 32) {
            float wide = length * half_to_float(deviations[block * (CENTRES - 1) + i / CENTRE]);
            float own_centre = each[0];
            for (int k = 1; k < CENTRES - 1; ++k) own_centre = i / CENTRE == k ? each[k] : own_centre;
            float left = own[(t0 / TILE + tile) * TILE + i] - own_centre;
            found += left * left, expected += wide * wide;
        }
    }
    found = block_sum(found), expected = block_sum(expected);
    float scale = key_scale[g], variance = expected > 0 ? found / (expected * scale * scale) - SIGN_NOISE : 1;
    if (threadIdx.x == 0) lengths[row] = length * sqrtf(fmaxf(variance, LEAST_VARIANCE));
}

// Which tiles can matter for a query token: chosen (G, n, tiles) gets 1 or 0, counts (G, n, 3)
// how many in its third number, samples among them. s (G, heads * n, t1 - t0) are estimates, -inf where a token is not seen; totals (G, heads * n)
// the logarithm of the sum of all weights, by which the least weight is `least_score`. A tile matters if a token that is seen
// can reach that: its deviation is that of its 16 tokens times the query's length. Grid (tiles / WARPS, G * n).
extern "C" __global__ void __launch_bounds__(THREADS)
select_tiles(const float* s, int group_stride, int row_stride, int t0, int t1, const float* lengths, const u16* deviations,
             int capacity, const float* totals, float least_score, int heads, int n, const u8* sampled, u8* chosen, u64* counts)
{
    int g = blockIdx.y / n, j = blockIdx.y % n, first = t0 / TILE, tiles = divide_up(t1, TILE) - first, lane = threadIdx.x % 32;
    int tile = blockIdx.x * WARPS + threadIdx.x / 32;
    if (tile >= tiles) return;
    bool reaches = false;
    for (int r = 0; r < heads; ++r) {
        i64 row = (i64)g * heads * n + r * n + j;
        const float* own = s + (i64)g * group_stride + (i64)(r * n + j) * row_stride - t0;
#pragma unroll
        for (int i = lane; i < TILE; i += 32) {
            int t = (first + tile) * TILE + i;
            if (t < t0 || t >= t1) continue;
            float x = lengths[row] * half_to_float(deviations[((i64)g * capacity + t) / CENTRE]);
            float above = fmaxf(REACH * x, x * x) - fminf(x * x / 2, REACH * x);
            reaches = reaches || (own[t] > MINUS_INFINITY && own[t] + above >= totals[row] + least_score);
        }
    }
    bool any = __ballot_sync(EVERY_LANE, reaches) != 0;
    if (lane != 0) return;
    chosen[(i64)blockIdx.y * tiles + tile] = any;
    if (any || sampled[tile]) atomicAdd(&counts[3 * blockIdx.y + 2], (u64)1);
}
