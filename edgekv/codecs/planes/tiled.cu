// A share of attention over keys in planes (as in planes.cu) and interleaved values, on tensor cores from sm_80 on;
// KEY_DIM = HEAD_DIM, 64 or 128. A warp goes by itself, two tiles of 64 tokens at a time. Signs are multiplied as bits, with
// the bits of the queries' whole numbers; centres and values as bytes, with queries of 16 bits and weights of 8.
//
// Lane 4 i + j, in steps: of keys it reads the columns j, j + 4 .. of group i % 4 of tile i / 4, and is left with the scores
// of that tile's tokens 16 j + 4 (i % 4) .. + 3; of centres row i of both tiles; of values the channels 32 y + 4 i .. + 3.
// In sums over values columns of the second factor are: a row of queries, a tile, and the lower or upper half of the codes.

// What the warps of a block share here: the queries, which are rotated and rounded to whole numbers here, and
// what each warp finds; and the output, which is rotated back.

#define WIDE (HEAD_DIM / 32)              // columns of 8 channels, words of centres, times 32 channels: of a lane
#define TOGETHER (ROWS <= 2)              // whether the two tiles' values are summed at once
#define SETS divide_up(ROWS, 4)           // of 8 columns
#define SLOTS (VALUE_BITS > 2 ? 2 : 1)    // words of values and channel that a lane reads of a tile
#define ROWS_TURNED (2 * THREADS / HEAD_DIM)
#define LARGEST 32639                     // 127 * 256 + 127

struct TiledShared {
    alignas(16) u8 digits[ROWS][2][HEAD_DIM];  // of the rotated queries, high ones first
    alignas(16) u8 whole[ROWS][HEAD_DIM];      // twice the queries' whole numbers
    alignas(16) u32 weights[WARPS][ROWS][2][TILE / 4];
    float units[WARPS][ROWS][2];         // what a weight of 1 stands for
    float step[ROWS], all[ROWS];         // what a number of 1 stands for, and the sum of the numbers
    float half_unit[ROWS];               // half of what a digit of 1 stands for
    int offset[ROWS];                    // twice what the codes' middle adds, in digits
    float peaks[WARPS][ROWS], totals[WARPS][ROWS], offsets[WARPS][ROWS];
    float turned[ROWS_TURNED][2][HEAD_DIM];
    float parts[WARPS][ROWS][HEAD_DIM];
};

// A row of rotated queries, by a warp, in whole numbers and in digits.
__device__ void round_row(TiledShared& shared, const float* from, int m, float key_scale)
{
    int lane = threadIdx.x % 32;
    bool there = 4 * lane < HEAD_DIM;
    float x[4];
    UNROLL for (int k = 0; k < 4; ++k) x[k] = there ? from[4 * lane + k] * TURN_FACTOR : 0;
    float size = lane_max(fabsf(x[0]) + fabsf(x[1]) + fabsf(x[2]) + fabsf(x[3])) / LARGEST_FOUR;
    float divisor = size == 0 ? 1 : size;
    float most = lane_max(fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3]))));
    float inverse = most > 1e-30f ? LARGEST / most : 0, sum = 0;
    u32 whole = 0, high = 0, low = 0, digits = 0;
    UNROLL for (int k = 0; k < 4; ++k) {
        float number = floorf(x[k] / divisor) + 0.5f;
        int digit = __float2int_rn(x[k] * inverse), upper = digit + 128 >> 8;
        sum += there ? number : 0, digits += (u32)digit;
        whole |= ((u32)(int)(2 * number) & 255) << 8 * k;
        high |= ((u32)upper & 255) << 8 * k, low |= ((u32)(digit - 256 * upper) & 255) << 8 * k;
    }
    sum = lane_sum(sum), digits = lane_sum(digits);
    if (there) {
        ((u32*)shared.whole[m])[lane] = whole;
        ((u32*)shared.digits[m][0])[lane] = high, ((u32*)shared.digits[m][1])[lane] = low;
    }
    if (lane == 0) {
        shared.step[m] = size * key_scale, shared.all[m] = sum;
        shared.half_unit[m] = most * (0.5f / LARGEST), shared.offset[m] = -15 * (int)digits;
    }
}

// x (ROWS, HEAD_DIM) in shared memory, rotated back, added to out.
__device__ void turn_back(TiledShared& shared, const float (*x)[HEAD_DIM], const float* flips, float* out)
{
    for (int base = 0; base < ROWS; base += ROWS_TURNED) {
        for (int k = threadIdx.x; k < ROWS_TURNED * HEAD_DIM; k += THREADS)
            shared.turned[k / HEAD_DIM][0][k % HEAD_DIM] = base + k / HEAD_DIM < ROWS ? x[base + k / HEAD_DIM][k % HEAD_DIM] : 0;
        int side = transform(shared.turned);
        for (int k = threadIdx.x; k < least(ROWS_TURNED, ROWS - base) * HEAD_DIM; k += THREADS) {
            int c = k % HEAD_DIM;
            out[base * HEAD_DIM + k] += shared.turned[k / HEAD_DIM][side][c] * TURN_FACTOR * flips[c];
        }
        __syncthreads();
    }
}

// Sums over the four lanes 4 i .. + 3, spread over them: lane j is left with x[0], x[1] of those that were its pair.
__device__ __forceinline__ void spread_sums(u32 (&x)[8])
{
    UNROLL for (int from = 1, n = 4; n >= 2; from *= 2, n /= 2) {
        bool upper = threadIdx.x & from;
        UNROLL for (int k = 0; k < 4; ++k) {
            if (k >= n) continue;
            u32 other = upper ? x[k] : x[k + n], own = upper ? x[k + n] : x[k];
            x[k] = own + __shfl_xor_sync(EVERY_LANE, other, from);
        }
    }
}

// What a warp holds, and reads of tiles.

struct TiledWarp {
    TiledShared& shared;
    const uint4 *planes, *codes, *centres;
    const u16 *key_scale, *value_scale, *centre_step;
    int warp, i, j, last, from, to;  // tiles from `last` on are not there; tokens from .. to are seen
    int key_bits, value_bits, rows_of_values[2];
    u32 digits[SETS][2][WIDE], bits[ROWS];
    u32 key[KEY_BITS][WIDE][4], centre[2][WIDE], value[2][SLOTS][WIDE][4];
    uint2 key_width, value_width;
    float step_of_centre[2];
    float peak[ROWS], total[ROWS], offset[ROWS];
    float sum[SETS][WIDE][2][2];
    int c[SETS][WIDE][2][4];

    __device__ TiledWarp(TiledShared& shared, const Store& keys, const Store& values, const Span& span, int last, int g)
        : shared(shared), warp(threadIdx.x / 32), i(threadIdx.x % 32 / 4), j(threadIdx.x % 4), last(last)
    {
        i64 key_blocks = keys.capacity / TILE, value_blocks = values.capacity / TILE;
        key_bits = KEY_HEADS ? ((const int*)keys.e)[2 * g + 1] : KEY_BITS;
        value_bits = VALUE_HEADS ? ((const int*)values.c)[2 * g + 1] : VALUE_BITS;
        i64 first_key = KEY_HEADS ? ((const int*)keys.e)[2 * g] : g * KEY_BITS;
        i64 first_value = VALUE_HEADS ? ((const int*)values.c)[2 * g] : g * VALUE_BITS;
        planes = (const uint4*)keys.a + first_key * key_blocks * (HEAD_DIM / 2) + i % 4 * (HEAD_DIM / 8) + j;
        codes = (const uint4*)values.a + first_value * value_blocks * (HEAD_DIM / 2) + i;
        key_scale = (const u16*)keys.b + (i64)g * keys.capacity + 16 * j + 4 * (i % 4);
        value_scale = (const u16*)values.b + (i64)g * values.capacity + 16 * j + 4 * (i % 4);
        centre_step = (const u16*)keys.d + (i64)g * key_blocks * 5;
        centres = (const uint4*)((const u8*)keys.c + (i64)g * key_blocks * 5 * (HEAD_DIM / 2) + j * (HEAD_DIM / 8));
        rows_of_values[0] = value_bits == 1 ? j % 2 : value_bits == 4 ? 2 * j : j;
        rows_of_values[1] = value_bits == 3 ? 4 + j % 2 : 2 * j + 1;
        from = most(span.t0, span.lo - span.position + span.t0);
        to = least(least(span.t1, span.hi - span.position + span.t0), last * TILE);
        UNROLL for (int m = 0; m < ROWS; ++m) peak[m] = MINUS_INFINITY, total[m] = offset[m] = 0;
        UNROLL for (int s = 0; s < SETS; ++s)
            UNROLL for (int y = 0; y < WIDE; ++y)
                for (int k = 0; k < 4; ++k) sum[s][y][k / 2][k % 2] = 0;
    }

    // What the block has made of the queries.
    __device__ void take_queries()
    {
        UNROLL for (int s = 0; s < SETS; ++s) {
            int m = 4 * s + i / 2;
            UNROLL for (int half = 0; half < 2; ++half) {
                const u32* at = (const u32*)shared.digits[least(m, ROWS - 1)][i % 2] + half * (HEAD_DIM / 8) + j * WIDE;
                UNROLL for (int k = 0; k < WIDE; ++k) digits[s][half][k] = m < ROWS ? at[k] : 0;
            }
        }
        UNROLL for (int m = 0; m < ROWS; ++m) {
            bits[m] = 0;
            UNROLL for (int k = 0; k < 2 * WIDE; ++k) {  // bit i of four channels
                u32 four = ((const u32*)shared.whole[m])[(8 * j + 32 * (k / 2)) / 4 + k % 2] >> i & 0x01010101u;
                bits[m] |= (four * 0x01020408u >> 24) << 4 * k;
            }
        }
    }

    __device__ void load_keys(int tile)
    {
        int at = tile + i / 4;
        UNROLL for (int p = 0; p < KEY_BITS; ++p)
            UNROLL for (int k = 0; k < WIDE; ++k) {
                uint4 x = {0, 0, 0, 0};
                if (at < last && p < key_bits) x = planes[((i64)at * key_bits + p) * (HEAD_DIM / 2) + 4 * k];
                key[p][k][0] = x.x, key[p][k][1] = x.y, key[p][k][2] = x.z, key[p][k][3] = x.w;
            }
    }

    __device__ void load_scales(int tile)
    {
        int at = tile + i / 4;
        uint2 nothing = {0, 0};
        key_width = at < last ? *(const uint2*)(key_scale + (i64)at * TILE) : nothing;
        value_width = at < last ? *(const uint2*)(value_scale + (i64)at * TILE) : nothing;
        UNROLL for (int u = 0; u < 2; ++u) {
            bool there = i < 5 && tile + u < last;
            i64 row = (i64)(tile + u) * 5 + i;
            step_of_centre[u] = there ? half_to_float(centre_step[row]) : 0;
            UNROLL for (int k = 0; k < WIDE; ++k) centre[u][k] = 0;
            if (there) load_words<WIDE>((const u8*)centres + row * (HEAD_DIM / 2), centre[u]);
        }
    }

    __device__ void load_values(int u, int tile)
    {
        UNROLL for (int slot = 0; slot < SLOTS; ++slot)
            UNROLL for (int y = 0; y < WIDE; ++y) {
                uint4 x = {0, 0, 0, 0};
                i64 row = (i64)(tile + u) * 2 * value_bits + rows_of_values[slot];
                if (tile + u < last && (slot == 0 || value_bits > 2)) x = codes[row * (HEAD_DIM / 4) + 8 * y];
                value[u][slot][y][0] = x.x, value[u][slot][y][1] = x.y, value[u][slot][y][2] = x.z, value[u][slot][y][3] = x.w;
            }
    }

    // The products of all rows with this lane's tokens: number times 2 ** (bits - 1 - plane) * sign, and once more.
    __device__ __forceinline__ void multiply_signs(int (&product)[ROWS][4])
    {
        u32 w0 = 1u << 2 * j, w1 = j == 3 ? (u32)-128 : 2u << 2 * j;
        UNROLL for (int p = 0; p < KEY_BITS; ++p) {
            if (p > 0 && p >= key_bits) break;
            u32 token[16];
            UNROLL for (int a = 0; a < 4; ++a) {
                u32 low = __byte_perm(key[p][0][a], key[p][1][a], 0x5140), high = __byte_perm(key[p][0][a], key[p][1][a], 0x7362);
                u32 low2 = WIDE > 2 ? __byte_perm(key[p][2 % WIDE][a], key[p][3 % WIDE][a], 0x5140) : 0;
                u32 high2 = WIDE > 2 ? __byte_perm(key[p][2 % WIDE][a], key[p][3 % WIDE][a], 0x7362) : 0;
                token[4 * a] = __byte_perm(low, low2, 0x5410), token[4 * a + 1] = __byte_perm(low, low2, 0x7632);
                token[4 * a + 2] = __byte_perm(high, high2, 0x5410), token[4 * a + 3] = __byte_perm(high, high2, 0x7632);
            }
            UNROLL for (int m = 0; m < ROWS; ++m) {
                u32 x[8];
                UNROLL for (int y = 0; y < 8; ++y) {
                    int counts[4] = {0, 0, 0, 0};
                    multiply_bits(counts, token[y], token[y + 8], bits[m]);
                    x[2 * (y % 4) + y / 4] = (counts[0] + ((u32)counts[2] << 16)) * w0 + (counts[1] + ((u32)counts[3] << 16)) * w1;
                }
                spread_sums(x);
                UNROLL for (int k = 0; k < 2; ++k) {
                    int low = (int)(short)x[k], high = (int)(x[k] - (u32)low) >> 16;
                    product[m][k] = (p > 0 ? 2 * product[m][k] : 0) + low;
                    product[m][k + 2] = (p > 0 ? 2 * product[m][k + 2] : 0) + high;
                }
            }
        }
    }

    // Of row 4 s + j of the queries with centre i - the common one and, from 1 on, one of 16 tokens - of each tile; with
    // what the common one gives.
    __device__ __forceinline__ void multiply_centres(int s, float (&near)[2])
    {
        int c[4] = {0, 0, 0, 0}, m = least(4 * s + j, ROWS - 1);
        UNROLL for (int k = 0; k < WIDE; ++k) {
            u32 four = 0x0f0f0f0fu;
            u32 a[4] = {centre[0][k] & four, centre[1][k] & four, centre[0][k] >> 4 & four, centre[1][k] >> 4 & four};
            multiply_bytes(c, a, digits[s][0][k], digits[s][1][k]);
        }
        UNROLL for (int u = 0; u < 2; ++u) {
            near[u] = (float)(512 * c[2 * u] + 2 * c[2 * u + 1] + shared.offset[m]) * shared.half_unit[m] * step_of_centre[u];
            near[u] += __shfl_sync(EVERY_LANE, near[u], j);
        }
    }

    // s = the scores of a step's tokens, from what was multiplied and their scales.
    __device__ __forceinline__ void scores(int tile, const int (&product)[ROWS][4], const float (&near)[SETS][2], const float (&width)[4],
                                           float (&s)[ROWS][4])
    {
        int at = (tile + i / 4) * TILE + 16 * j + 4 * (i % 4);
        bool whole = tile * TILE >= from && (tile + 2) * TILE <= to;
        UNROLL for (int m = 0; m < ROWS; ++m) {
            float own = __shfl_sync(EVERY_LANE, near[m / 4][0], 4 + 4 * j + m % 4);
            float other = __shfl_sync(EVERY_LANE, near[m / 4][1], 4 + 4 * j + m % 4);
            own = i < 4 ? own : other;
            float all = (float)((1 << key_bits) - 1) * shared.all[m], step = shared.step[m];
            UNROLL for (int k = 0; k < 4; ++k) {
                s[m][k] = bounded(own + step * width[k] * ((float)product[m][k] - all));
                if (!whole && (at + k < from || at + k >= to)) s[m][k] = MINUS_INFINITY;
            }
        }
    }

    // The weights of a step's tokens into shared memory, in bytes; what was summed before shrinks where a maximum rises.
    __device__ __forceinline__ void weigh(const float (&s)[ROWS][4], const float (&width)[4])
    {
        float shrink[ROWS];
        bool shrinks = false;
        __syncwarp();
        UNROLL for (int m = 0; m < ROWS; ++m) {
            float top = fmaxf(peak[m], lane_max(fmaxf(fmaxf(s[m][0], s[m][1]), fmaxf(s[m][2], s[m][3]))));
            float base = top == MINUS_INFINITY ? 0 : top, w[4];
            shrink[m] = __expf(peak[m] - base), shrinks = shrinks || shrink[m] != 1;
            peak[m] = top, total[m] *= shrink[m], offset[m] *= shrink[m];
            UNROLL for (int k = 0; k < 4; ++k) {
                float p = __expf(s[m][k] - base);
                total[m] += p, w[k] = p * width[k];
            }
            float largest = fmaxf(fmaxf(w[0], w[1]), fmaxf(w[2], w[3]));
            UNROLL for (int k = 1; k < 16; k *= 2) largest = fmaxf(largest, __shfl_xor_sync(EVERY_LANE, largest, k));
            float inverse = 255 / fmaxf(largest, 1e-30f), unit = largest * (1.0f / 255);
            u32 word = 0;
            UNROLL for (int k = 0; k < 4; ++k) word |= (u32)__float2int_rn(w[k] * inverse) << 8 * k;
            offset[m] += unit * (float)dot_bytes(word, 0x01010101u, 0);
            shared.weights[warp][m][i / 4][4 * j + i % 4] = word;
            if (i % 4 == 0 && j == 0) shared.units[warp][m][i / 4] = unit;
        }
        __syncwarp();
        if (!shrinks) return;
        UNROLL for (int set = 0; set < SETS; ++set) {
            int mine = TOGETHER ? j / 2 : 4 * set + j;
            float factor = 1;
            UNROLL for (int m = 0; m < ROWS; ++m) factor = m == mine ? shrink[m] : factor;
            UNROLL for (int y = 0; y < WIDE; ++y)
                UNROLL for (int k = 0; k < 4; ++k) sum[set][y][k / 2][k % 2] *= factor;
        }
    }

    // c += weights times PART bits of the codes of tile u, in SLOT.
    template <int PART, int SLOT> __device__ __forceinline__ void multiply_values(int u)
    {
        u32 weight[SETS][2];
        UNROLL for (int set = 0; set < SETS; ++set) {
            int m = TOGETHER ? i / 4 : 4 * set + i / 2, tile = TOGETHER ? i / 2 % 2 : u, half = i % 2;
            const u32* words = shared.weights[warp][least(m, ROWS - 1)][tile];
            UNROLL for (int z = 0; z < 2; ++z) {
                int at = PART == 2   ? j + 4 * z + 8 * half
                         : PART == 1 ? j % 2 + 8 * (j / 2) + 2 * z + 4 * half
                                     : 2 * j + z + 8 * half;
                weight[set][z] = tile == u && m < ROWS ? words[at] : 0;
            }
        }
        u32 low = PART == 1 ? 0x01010101u : PART == 2 ? 0x03030303u : 0x0f0f0f0fu, high = low << (PART == 1 ? 2 : 4);
        UNROLL for (int y = 0; y < WIDE; ++y)
            UNROLL for (int h = 0; h < 2; ++h) {
                u32 x0 = value[u][SLOT][y][2 * h], x1 = value[u][SLOT][y][2 * h + 1], y0, y1;
                if (PART == 1) x0 >>= 4 * (j / 2), x1 >>= 4 * (j / 2);
                if (PART == 4)
                    y0 = value[u][SLOTS - 1][y][2 * h], y1 = value[u][SLOTS - 1][y][2 * h + 1];
                else
                    y0 = x0 >> PART, y1 = x1 >> PART;
                u32 lower[4] = {x0 & low, x1 & low, y0 & low, y1 & low};
                u32 upper[4] = {x0 & high, x1 & high, y0 & high, y1 & high};
                UNROLL for (int set = 0; set < SETS; ++set) {
                    bool is_upper = i % 2;
                    multiply_codes(c[set][y][h], lower, is_upper ? 0 : weight[set][0], is_upper ? 0 : weight[set][1]);
                    multiply_codes(c[set][y][h], upper, is_upper ? weight[set][0] : 0, is_upper ? weight[set][1] : 0);
                }
            }
    }

    __device__ __forceinline__ void clear_products()
    {
        UNROLL for (int set = 0; set < SETS; ++set)
            UNROLL for (int y = 0; y < WIDE; ++y)
                UNROLL for (int k = 0; k < 8; ++k) c[set][y][k / 4][k % 4] = 0;
    }

    // sum += c, of which a code's 1 stands for `factor` and the upper halves count `times` as much.
    __device__ __forceinline__ void take_products(int u, int times, float factor)
    {
        UNROLL for (int set = 0; set < SETS; ++set) {
            int m = TOGETHER ? j / 2 : 4 * set + j, tile = TOGETHER ? j % 2 : u;
            float unit = m < ROWS ? shared.units[warp][least(m, ROWS - 1)][tile] * (factor / times) : 0;
            UNROLL for (int y = 0; y < WIDE; ++y)
                UNROLL for (int h = 0; h < 2; ++h) {
                    const int(&each)[4] = c[set][y][h];
                    sum[set][y][h][0] += unit * (float)(times * each[0] + each[1]);
                    sum[set][y][h][1] += unit * (float)(times * each[2] + each[3]);
                }
        }
    }

    // The values of the tiles u .. u + n of a step.
    template <int PART, int SLOT> __device__ __forceinline__ void add_part(int u, int n, float factor)
    {
        clear_products();
        UNROLL for (int k = 0; k < 2; ++k)
            if (k >= u && k < u + n) multiply_values<PART, SLOT>(k);
        take_products(u, PART == 1 ? 4 : 16, factor);
    }

    __device__ __forceinline__ void add(int u, int n)
    {
        constexpr int MOST = VALUE_BITS;
        if (value_bits == 1 || MOST == 1) add_part<1, 0>(u, n, 1);
        else if (value_bits == 2 || MOST == 2) add_part<2, 0>(u, n, 1);
        else if (value_bits == 3 || MOST == 3) {
            add_part<2, 0>(u, n, 2);
            add_part<1, SLOTS - 1>(u, n, 1);
        } else add_part<4, 0>(u, n, 1);
    }

    // All reads begin at one place: what waits for some of a warp's reads waits for all of them.
    __device__ __forceinline__ void step(int tile)
    {
        int product[ROWS][4];
        float near[SETS][2], key_widths[4], value_widths[4], s[ROWS][4];
        multiply_signs(product);
        UNROLL for (int set = 0; set < SETS; ++set) multiply_centres(set, near[set]);
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
    __device__ void finish()
    {
        UNROLL for (int set = 0; set < SETS; ++set)
            UNROLL for (int y = 0; y < WIDE; ++y)
                UNROLL for (int k = 0; k < 4; ++k) {
                    float x = sum[set][y][k / 2][k % 2];
                    if (TOGETHER) x += __shfl_xor_sync(EVERY_LANE, x, 1);
                    int m = TOGETHER ? j / 2 : 4 * set + j;
                    if (m < ROWS && (!TOGETHER || j % 2 == 0)) shared.parts[warp][m][32 * y + 4 * i + k] = x;
                }
        UNROLL for (int m = 0; m < ROWS; ++m) {
            float all = lane_sum(total[m]), added = lane_sum(offset[m]) * (-0.5f * ((1 << value_bits) - 1));
            if (threadIdx.x % 32 == 0) shared.peaks[warp][m] = peak[m], shared.totals[warp][m] = all, shared.offsets[warp][m] = added;
        }
    }

    static __device__ __forceinline__ void unpack(const uint2& x, float (&y)[4])
    {
        y[0] = half_to_float((u16)x.x), y[1] = half_to_float((u16)(x.x >> 16));
        y[2] = half_to_float((u16)x.y), y[3] = half_to_float((u16)(x.y >> 16));
    }
};

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
        int side = transform(shared.turned);
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
        UNROLL for (int w = 0; w < WARPS; ++w) peak = fmaxf(peak, shared.peaks[w][m]);
        UNROLL for (int w = 0; w < WARPS; ++w) {
            float factor = __expf(shared.peaks[w][m] - (peak == MINUS_INFINITY ? 0 : peak));
            total += factor * shared.totals[w][m], x += factor * (shared.parts[w][m][c] + shared.offsets[w][m]);
        }
        out[m][c] = x;
        if (c == 0) ends[2 * m] = peak, ends[2 * m + 1] = total;
    }
    __syncthreads();
}
