// Scores of the keys of two tiles, and from them the weights of their tokens; for tiled_planes.cu.

// Sums over the four lanes 4 i .. + 3, spread over them: lane j is left with x[0], x[1] of those that were its pair.
__device__ __forceinline__ void spread_sums(u32 (&x)[8])
{
#pragma unroll
    for (int from = 1, n = 4; n >= 2; from *= 2, n /= 2) {
        bool upper = threadIdx.x & from;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (k >= n) continue;
            u32 other = upper ? x[k] : x[k + n], own = upper ? x[k + n] : x[k];
            x[k] = own + __shfl_xor_sync(EVERY_LANE, other, from);
        }
    }
}

// The products of all rows with this lane's tokens: number times 2 ** (bits - 1 - plane) * sign, and once more.
__device__ __forceinline__ void TiledWarp::multiply_signs(int (&product)[ROWS][4])
{
    u32 w0 = 1u << 2 * j, w1 = j == 3 ? (u32)-128 : 2u << 2 * j;
#pragma unroll
    for (int p = 0; p < KEY_BITS; ++p) {
        if (p > 0 && p >= key_bits) break;
        u32 token[16];
#pragma unroll
        for (int a = 0; a < 4; ++a) {
            u32 low = __byte_perm(key[p][0][a], key[p][1][a], 0x5140), high = __byte_perm(key[p][0][a], key[p][1][a], 0x7362);
            u32 low2 = WIDE > 2 ? __byte_perm(key[p][2 % WIDE][a], key[p][3 % WIDE][a], 0x5140) : 0;
            u32 high2 = WIDE > 2 ? __byte_perm(key[p][2 % WIDE][a], key[p][3 % WIDE][a], 0x7362) : 0;
            token[4 * a] = __byte_perm(low, low2, 0x5410), token[4 * a + 1] = __byte_perm(low, low2, 0x7632);
            token[4 * a + 2] = __byte_perm(high, high2, 0x5410), token[4 * a + 3] = __byte_perm(high, high2, 0x7632);
        }
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            u32 x[8];
#pragma unroll
            for (int y = 0; y < 8; ++y) {
                int counts[4] = {0, 0, 0, 0};
                multiply_bits(counts, token[y], token[y + 8], bits[m]);
                x[2 * (y % 4) + y / 4] = (counts[0] + ((u32)counts[2] << 16)) * w0 + (counts[1] + ((u32)counts[3] << 16)) * w1;
            }
            spread_sums(x);
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                int low = (int)(short)x[k], high = (int)(x[k] - (u32)low) >> 16;
                product[m][k] = (p > 0 ? 2 * product[m][k] : 0) + low;
                product[m][k + 2] = (p > 0 ? 2 * product[m][k + 2] : 0) + high;
            }
        }
    }
}

// Of row 4 s + j of the queries with centre i - the common one and, from 1 on, one of 16 tokens - of each tile; with
// what the common one gives.
__device__ __forceinline__ void TiledWarp::multiply_centres(int s, float (&near)[2])
{
    int c[4] = {0, 0, 0, 0}, m = least(4 * s + j, ROWS - 1);
#pragma unroll
    for (int k = 0; k < WIDE; ++k) {
        u32 four = 0x0f0f0f0fu;
        u32 a[4] = {centre[0][k] & four, centre[1][k] & four, centre[0][k] >> 4 & four, centre[1][k] >> 4 & four};
        multiply_bytes(c, a, digits[s][0][k], digits[s][1][k]);
    }
#pragma unroll
    for (int u = 0; u < 2; ++u) {
        near[u] = (float)(512 * c[2 * u] + 2 * c[2 * u + 1] + shared.offset[m]) * shared.half_unit[m] * step_of_centre[u];
        near[u] += __shfl_sync(EVERY_LANE, near[u], j);
    }
}

// s = the scores of a step's tokens, from what was multiplied and their scales.
__device__ __forceinline__ void TiledWarp::scores(int tile, const int (&product)[ROWS][4], const float (&near)[SETS][2], const float (&width)[4],
                                       float (&s)[ROWS][4])
{
    int at = (tile + i / 4) * TILE + 16 * j + 4 * (i % 4);
    bool whole = tile * TILE >= from && (tile + 2) * TILE <= to;
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
        float own = __shfl_sync(EVERY_LANE, near[m / 4][0], 4 + 4 * j + m % 4);
        float other = __shfl_sync(EVERY_LANE, near[m / 4][1], 4 + 4 * j + m % 4);
        own = i < 4 ? own : other;
        float all = (float)((1 << key_bits) - 1) * shared.all[m], step = shared.step[m];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            s[m][k] = bounded(own + step * width[k] * ((float)product[m][k] - all));
            if (!whole && (at + k < from || at + k >= to)) s[m][k] = MINUS_INFINITY;
        }
    }
}

// The weights of a step's tokens into shared memory, in bytes; what was summed before shrinks where a maximum rises.
__device__ __forceinline__ void TiledWarp::weigh(const float (&s)[ROWS][4], const float (&width)[4])
{
    float shrink[ROWS];
    bool shrinks = false;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
        float top = fmaxf(peak[m], lane_max(fmaxf(fmaxf(s[m][0], s[m][1]), fmaxf(s[m][2], s[m][3]))));
        float base = top == MINUS_INFINITY ? 0 : top, w[4];
        shrink[m] = __expf(peak[m] - base), shrinks = shrinks || shrink[m] != 1;
        peak[m] = top, total[m] *= shrink[m], offset[m] *= shrink[m];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            float p = __expf(s[m][k] - base);
            total[m] += p, w[k] = p * width[k];
        }
        float largest = fmaxf(fmaxf(w[0], w[1]), fmaxf(w[2], w[3]));
#pragma unroll
        for (int k = 1; k < 16; k *= 2) largest = fmaxf(largest, __shfl_xor_sync(EVERY_LANE, largest, k));
        float inverse = 255 / fmaxf(largest, 1e-30f), unit = largest * (1.0f / 255);
        u32 word = 0;
#pragma unroll
        for (int k = 0; k < 4; ++k) word |= (u32)__float2int_rn(w[k] * inverse) << 8 * k;
        offset[m] += unit * (float)dot_bytes(word, 0x01010101u, 0);
        shared.weights[warp][m][i / 4][4 * j + i % 4] = word;
        if (i % 4 == 0 && j == 0) shared.units[warp][m][i / 4] = unit;
    }
    __syncwarp();
    if (!shrinks) return;
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
        int mine = TOGETHER ? j / 2 : 4 * set + j;
        float factor = 1;
#pragma unroll
        for (int m = 0; m < ROWS; ++m) factor = m == mine ? shrink[m] : factor;
#pragma unroll
        for (int y = 0; y < WIDE; ++y)
#pragma unroll
            for (int k = 0; k < 4; ++k) sum[set][y][k / 2][k % 2] *= factor;
    }
}
