// The second stage of `bitplane`: the tokens whose probability matters, by a warp each. ROWS query heads
// share a KV head, of KEY_DIM channels, a multiple of 64; channel c is bit c % 32 of 32-bit word c / 32.

#define PER_LANE (KEY_DIM / 32)
#define HALVES (KEY_DIM / 32)  // 32-bit words of a plane

// +-1 of this lane's channel in 32-bit word w of a plane.
__device__ __forceinline__ float sign_at(const u32* plane, int w) { return plane[w] >> threadIdx.x % 32 & 1 ? 1.0f : -1.0f; }

// Grid (splits, G * n). partial (G, splits, rows, KEY_DIM), changes (G, splits, rows), counts (G, n, 3): to its first two is added.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
attend_planes(const float* p, int group_stride, int row_stride, int t0, int t1, const float* q, const float* rounded,
              const float* key_scale, const u8* signs, const u16* scale, const u32* fine, const u32* top, const u32* low,
              const u16* value_scale, int capacity, float threshold, float full, int n, float* partial, float* changes,
              float* tail, u64* counts)
{
    __shared__ float exact[ROWS][KEY_DIM], coarse[ROWS][KEY_DIM];
    int g = blockIdx.y / n, j = blockIdx.y % n, warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = ROWS * n;
    for (int r = 0; r < ROWS; ++r) {
        i64 m = (i64)g * rows + r * n + j;
        for (int c = threadIdx.x; c < KEY_DIM; c += THREADS) {
            exact[r][c] = q[m * KEY_DIM + c] * KEY_STEP;
            coarse[r][c] = rounded[m * KEY_DIM + c] * key_scale[g];
        }
    }
    __syncthreads();
    float sum[ROWS][PER_LANE] = {}, change[ROWS] = {};
    u32 corrected = 0, read_in_full = 0;
    int b0 = t0 / TILE, blocks = divide_up(t1, TILE) - b0;
    int first = (i64)blocks * blockIdx.x / gridDim.x, last = (i64)blocks * (blockIdx.x + 1) / gridDim.x;
    for (int b = first + warp; b < last; b += WARPS) {
        float old[2][ROWS], rest[ROWS] = {};
        u32 chosen[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int t = (b0 + b) * TILE + 32 * h + lane;
            bool matters = false;
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                bool there = t >= t0 && t < t1;
                old[h][r] = there ? p[(i64)g * group_stride + (i64)(r * n + j) * row_stride + t - t0] : 0;
                matters = matters || old[h][r] >= threshold;
            }
            chosen[h] = __ballot_sync(EVERY_LANE, matters);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) rest[r] += matters ? 0 : old[h][r];
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) rest[r] = lane_sum(rest[r]);
#pragma unroll
        for (int h = 0; h < 2; ++h)
            for (u32 left = chosen[h]; left; left &= left - 1) {
                int in_warp = __ffs(left) - 1, i = 32 * h + in_warp;
                i64 t = (i64)g * capacity + (b0 + b) * TILE + i;
                const u8* own = signs + t / TILE * 8 * KEY_DIM + i % 16 / 4 * 2 * KEY_DIM + 4 * (i % 4) + (i / 16 & 1) * 2 + i / 32;
                float product[ROWS] = {}, now[ROWS], largest = 0;
#pragma unroll
                for (int w = 0; w < PER_LANE; ++w) {
                    float sign = own[(4 * w + lane / 8) * 16] >> lane % 8 & 1 ? 1.0f : -1.0f;
                    const u32* planes = fine + t * 3 * HALVES;
                    float level = 4 * sign + 2 * sign_at(planes, w) + sign_at(planes + HALVES, w) +
                                  0.5f * sign_at(planes + 2 * HALVES, w);
#pragma unroll
                    for (int r = 0; r < ROWS; ++r)
                        product[r] += exact[r][32 * w + lane] * level - coarse[r][32 * w + lane] * sign;
                }
                float width = half_to_float(scale[t]), size = half_to_float(value_scale[t]);
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    float before = __shfl_sync(EVERY_LANE, old[h][r], in_warp);
                    float correction = width * lane_sum(product[r]);
                    now[r] = before * expf(fminf(fmaxf(correction, -LARGEST_CORRECTION), LARGEST_CORRECTION));
                    change[r] += now[r] - before;
                    largest = fmaxf(largest, now[r]);
                }
                bool all_planes = largest >= full;
                corrected += 1, read_in_full += all_planes;
                if (largest < threshold) {
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) rest[r] += now[r];
                    continue;
                }
                const u32 *upper = top + t * 2 * HALVES, *lower = low + t * 2 * HALVES;
#pragma unroll
                for (int w = 0; w < PER_LANE; ++w) {
                    float x = sign_at(upper, w) + 0.5f * sign_at(upper + HALVES, w);
                    if (all_planes)
                        x = 4 * x + sign_at(lower, w) + 0.5f * sign_at(lower + HALVES, w);
                    else
                        x *= PAIR_STEP;
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) sum[r][w] += now[r] * (x * size);
                }
            }
        if (lane == 0)
            for (int r = 0; r < ROWS; ++r) tail[((i64)g * rows + r * n + j) * blocks + b] = rest[r];
    }
    if (lane == 0) {
        atomicAdd(&counts[3 * blockIdx.y], (u64)corrected);
        atomicAdd(&counts[3 * blockIdx.y + 1], (u64)read_in_full);
    }
    __shared__ float sums[WARPS][KEY_DIM], changed[WARPS];
    for (int r = 0; r < ROWS; ++r) {
        i64 at = ((i64)g * gridDim.x + blockIdx.x) * rows + r * n + j;
        __syncthreads();
        for (int w = 0; w < PER_LANE; ++w) sums[warp][32 * w + lane] = sum[r][w];
        if (lane == 0) changed[warp] = change[r];
        __syncthreads();
        for (int c = threadIdx.x; c < KEY_DIM; c += THREADS) {
            float total = 0;
            for (int w = 0; w < WARPS; ++w) total += sums[w][c];
            partial[at * KEY_DIM + c] = total;
        }
        if (threadIdx.x == 0) changes[at] = changed[0] + changed[1] + changed[2] + changed[3];
    }
}
