// A split of attention over keys in planes and interleaved values (see read.cu), on tensor cores from sm_80 on;
// KEY_DIM = HEAD_DIM, 64 or 128. Each warp takes tokens of its own, two tiles of 64 at a time. Signs are multiplied as bits by
// the bits of the queries' whole numbers; centres and values are multiplied as bytes, by queries of 16 bits and weights of 8.
//
// Lane 4 i + j reads the columns j, j + 4 .. of group i % 4 of tile i / 4 of the keys, row i of both tiles' centres, and the
// channels 32 y + 4 i .. + 3 of the values; it gets the scores of its tile's tokens 16 j + 4 (i % 4) .. + 3. In products with
// values a column of the second factor is a row of queries, a tile, and the lower or upper half of the codes.

#define WIDE (HEAD_DIM / 32)              // a lane's columns of 8 channels, and words of centres
#define TOGETHER (ROWS <= 2)              // whether one product sums the values of both tiles
#define SETS divide_up(ROWS, 4)           // sets of 8 columns
#define SLOTS (VALUE_BITS > 2 ? 2 : 1)    // words that a lane reads of a tile and channel of values
#define HADAMARD_ROWS (2 * THREADS / HEAD_DIM)
#define LARGEST 32639                     // 127 * 256 + 127

// What the warps of a block share: the queries, rotated and rounded to whole numbers, each warp's results, and the output, which is
// rotated back.
struct TiledShared {
    alignas(16) u8 digits[ROWS][2][HEAD_DIM];  // of the rotated queries, high ones first
    alignas(16) u8 doubled[ROWS][HEAD_DIM];     // twice the queries' whole numbers
    alignas(16) u32 weights[WARPS][ROWS][2][TILE / 4];
    float units[WARPS][ROWS][2];         // what a weight of 1 stands for
    float step[ROWS], number_sum[ROWS];        // what a number of 1 stands for, and the sum of the numbers
    float half_unit[ROWS];               // half of what a digit of 1 stands for
    int offset[ROWS];                    // twice what the codes' middle adds, in digits
    float running_max[WARPS][ROWS], running_sum[WARPS][ROWS], offsets[WARPS][ROWS];
    float rotated[HADAMARD_ROWS][2][HEAD_DIM];
    float parts[WARPS][ROWS][HEAD_DIM];
};

// Rounds a row of rotated queries to whole numbers and to digits, by a warp.
__device__ void round_row(TiledShared& shared, const float* from, int m, float key_scale)
{
    int lane = threadIdx.x % 32;
    bool exists = 4 * lane < HEAD_DIM;
    float x[4];
    UNROLL for (int k = 0; k < 4; ++k) x[k] = exists ? from[4 * lane + k] * HADAMARD_FACTOR : 0;
    float size = lane_max(fabsf(x[0]) + fabsf(x[1]) + fabsf(x[2]) + fabsf(x[3])) / MAX_FOUR_SUM;
    float divisor = size == 0 ? 1 : size;
    float largest = lane_max(fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3]))));
    float inverse = largest > 1e-30f ? LARGEST / largest : 0, sum = 0;
    u32 whole = 0, high = 0, low = 0, digits = 0;
    UNROLL for (int k = 0; k < 4; ++k) {
        float number = floorf(x[k] / divisor) + 0.5f;
        int digit = __float2int_rn(x[k] * inverse), upper = digit + 128 >> 8;
        sum += exists ? number : 0, digits += (u32)digit;
        whole |= ((u32)(int)(2 * number) & 255) << 8 * k;
        high |= ((u32)upper & 255) << 8 * k, low |= ((u32)(digit - 256 * upper) & 255) << 8 * k;
    }
    sum = lane_sum(sum), digits = lane_sum(digits);
    if (exists) {
        ((u32*)shared.doubled[m])[lane] = whole;
        ((u32*)shared.digits[m][0])[lane] = high, ((u32*)shared.digits[m][1])[lane] = low;
    }
    if (lane == 0) {
        shared.step[m] = size * key_scale, shared.number_sum[m] = sum;
        shared.half_unit[m] = largest * (0.5f / LARGEST), shared.offset[m] = -15 * (int)digits;
    }
}

// Rotates x (ROWS, HEAD_DIM), in shared memory, back and adds it to out.
__device__ void rotate_back(TiledShared& shared, const float (*x)[HEAD_DIM], const float* flips, float* out)
{
    for (int base = 0; base < ROWS; base += HADAMARD_ROWS) {
        for (int k = threadIdx.x; k < HADAMARD_ROWS * HEAD_DIM; k += THREADS)
            shared.rotated[k / HEAD_DIM][0][k % HEAD_DIM] = base + k / HEAD_DIM < ROWS ? x[base + k / HEAD_DIM][k % HEAD_DIM] : 0;
        int side = walsh_hadamard(shared.rotated);
        for (int k = threadIdx.x; k < min_of(HADAMARD_ROWS, ROWS - base) * HEAD_DIM; k += THREADS) {
            int c = k % HEAD_DIM;
            out[base * HEAD_DIM + k] += shared.rotated[k / HEAD_DIM][side][c] * HADAMARD_FACTOR * flips[c];
        }
        __syncthreads();
    }
}

// The state of a warp: its part of the tokens, what it has read of two tiles, and its running softmax.
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
    float running_max[ROWS], running_sum[ROWS], offset[ROWS];
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
        from = max_of(span.t0, span.lo - span.position + span.t0);
        to = min_of(min_of(span.t1, span.hi - span.position + span.t0), last * TILE);
        UNROLL for (int m = 0; m < ROWS; ++m) running_max[m] = MINUS_INFINITY, running_sum[m] = offset[m] = 0;
        UNROLL for (int s = 0; s < SETS; ++s)
            UNROLL for (int y = 0; y < WIDE; ++y)
                for (int k = 0; k < 4; ++k) sum[s][y][k / 2][k % 2] = 0;
    }

    // Takes this lane's part of the queries from shared memory.
    __device__ void take_queries()
    {
        UNROLL for (int s = 0; s < SETS; ++s) {
            int m = 4 * s + i / 2;
            UNROLL for (int half = 0; half < 2; ++half) {
                const u32* at = (const u32*)shared.digits[min_of(m, ROWS - 1)][i % 2] + half * (HEAD_DIM / 8) + j * WIDE;
                UNROLL for (int k = 0; k < WIDE; ++k) digits[s][half][k] = m < ROWS ? at[k] : 0;
            }
        }
        UNROLL for (int m = 0; m < ROWS; ++m) {
            bits[m] = 0;
            UNROLL for (int k = 0; k < 2 * WIDE; ++k) {  // bit i of four channels
                u32 four = ((const u32*)shared.doubled[m])[(8 * j + 32 * (k / 2)) / 4 + k % 2] >> i & 0x01010101u;
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
            bool exists = i < 5 && tile + u < last;
            i64 row = (i64)(tile + u) * 5 + i;
            step_of_centre[u] = exists ? half_to_float(centre_step[row]) : 0;
            UNROLL for (int k = 0; k < WIDE; ++k) centre[u][k] = 0;
            if (exists) load_words<WIDE>((const u8*)centres + row * (HEAD_DIM / 2), centre[u]);
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

    // Multiplies all rows by this lane's tokens: the sum of doubled numbers times 2 ** (bits - 1 - plane) * sign.
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
                    mma_and_popc(counts, token[y], token[y + 8], bits[m]);
                    x[2 * (y % 4) + y / 4] = (counts[0] + ((u32)counts[2] << 16)) * w0 + (counts[1] + ((u32)counts[3] << 16)) * w1;
                }
                int first = 0;
                bool is_owner = true;
                SpreadSum<8, 1, 4>::run(x, first, is_owner);  // leaves lane j its pair of sums
                UNROLL for (int k = 0; k < 2; ++k) {
                    int low = (int)(short)x[k], high = (int)(x[k] - (u32)low) >> 16;
                    product[m][k] = (p > 0 ? 2 * product[m][k] : 0) + low;
                    product[m][k + 2] = (p > 0 ? 2 * product[m][k + 2] : 0) + high;
                }
            }
        }
    }

    // Multiplies row 4 s + j of the queries by centre i of each tile (0 is the tile's, the others are those of 16 tokens), and adds
    // the score of the tile's centre.
    __device__ __forceinline__ void multiply_centres(int s, float (&centre_scores)[2])
    {
        int c[4] = {0, 0, 0, 0}, m = min_of(4 * s + j, ROWS - 1);
        UNROLL for (int k = 0; k < WIDE; ++k) {
            u32 four = 0x0f0f0f0fu;
            u32 a[4] = {centre[0][k] & four, centre[1][k] & four, centre[0][k] >> 4 & four, centre[1][k] >> 4 & four};
            mma_u8s8(c, a, digits[s][0][k], digits[s][1][k]);
        }
        UNROLL for (int u = 0; u < 2; ++u) {
            centre_scores[u] = (float)(512 * c[2 * u] + 2 * c[2 * u + 1] + shared.offset[m]) * shared.half_unit[m] * step_of_centre[u];
            centre_scores[u] += __shfl_sync(ALL_LANES, centre_scores[u], j);
        }
    }

    // Sets s to the scores of a step's tokens.
    __device__ __forceinline__ void scores(int tile, const int (&product)[ROWS][4], const float (&centre_scores)[SETS][2], const float (&width)[4],
                                           float (&s)[ROWS][4])
    {
        int at = (tile + i / 4) * TILE + 16 * j + 4 * (i % 4);
        bool sees_all = tile * TILE >= from && (tile + 2) * TILE <= to;
        UNROLL for (int m = 0; m < ROWS; ++m) {
            float centre_score = __shfl_sync(ALL_LANES, centre_scores[m / 4][0], 4 + 4 * j + m % 4);
            float second = __shfl_sync(ALL_LANES, centre_scores[m / 4][1], 4 + 4 * j + m % 4);
            centre_score = i < 4 ? centre_score : second;
            float zero = (float)((1 << key_bits) - 1) * shared.number_sum[m], step = shared.step[m];
            UNROLL for (int k = 0; k < 4; ++k) {
                s[m][k] = capped(centre_score + step * width[k] * ((float)product[m][k] - zero));
                if (!sees_all && (at + k < from || at + k >= to)) s[m][k] = MINUS_INFINITY;
            }
        }
    }

    // Puts the weights of a step's tokens into shared memory, as bytes; earlier sums shrink where a maximum rises.
    __device__ __forceinline__ void set_weights(const float (&s)[ROWS][4], const float (&width)[4])
    {
        float rescale[ROWS];
        bool rescales = false;
        __syncwarp();
        UNROLL for (int m = 0; m < ROWS; ++m) {
            float new_max = fmaxf(running_max[m], lane_max(fmaxf(fmaxf(s[m][0], s[m][1]), fmaxf(s[m][2], s[m][3]))));
            float base = new_max == MINUS_INFINITY ? 0 : new_max, w[4];
            rescale[m] = __expf(running_max[m] - base), rescales = rescales || rescale[m] != 1;
            running_max[m] = new_max, running_sum[m] *= rescale[m], offset[m] *= rescale[m];
            UNROLL for (int k = 0; k < 4; ++k) {
                float p = __expf(s[m][k] - base);
                running_sum[m] += p, w[k] = p * width[k];
            }
            float largest = fmaxf(fmaxf(w[0], w[1]), fmaxf(w[2], w[3]));
            UNROLL for (int k = 1; k < 16; k *= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, k));
            float inverse = 255 / fmaxf(largest, 1e-30f), unit = largest * (1.0f / 255);
            u32 word = 0;
            UNROLL for (int k = 0; k < 4; ++k) word |= (u32)__float2int_rn(w[k] * inverse) << 8 * k;
            offset[m] += unit * (float)dp4a(word, 0x01010101u, 0);
            shared.weights[warp][m][i / 4][4 * j + i % 4] = word;
            if (i % 4 == 0 && j == 0) shared.units[warp][m][i / 4] = unit;
        }
        __syncwarp();
        if (!rescales) return;
        UNROLL for (int set = 0; set < SETS; ++set) {
            int row = TOGETHER ? j / 2 : 4 * set + j;
            float factor = 1;
            UNROLL for (int m = 0; m < ROWS; ++m) factor = m == row ? rescale[m] : factor;
            UNROLL for (int y = 0; y < WIDE; ++y)
                UNROLL for (int k = 0; k < 4; ++k) sum[set][y][k / 2][k % 2] *= factor;
        }
    }

    // Adds weights times PART bits of the codes of tile u, in SLOT, to c.
    template <int PART, int SLOT> __device__ __forceinline__ void multiply_values(int u)
    {
        u32 weight[SETS][2];
        UNROLL for (int set = 0; set < SETS; ++set) {
            int m = TOGETHER ? i / 4 : 4 * set + i / 2, tile = TOGETHER ? i / 2 % 2 : u, half = i % 2;
            const u32* words = shared.weights[warp][min_of(m, ROWS - 1)][tile];
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
                    mma_u8u8(c[set][y][h], lower, is_upper ? 0 : weight[set][0], is_upper ? 0 : weight[set][1]);
                    mma_u8u8(c[set][y][h], upper, is_upper ? weight[set][0] : 0, is_upper ? weight[set][1] : 0);
                }
            }
    }

    __device__ __forceinline__ void clear_products()
    {
        UNROLL for (int set = 0; set < SETS; ++set)
            UNROLL for (int y = 0; y < WIDE; ++y)
                UNROLL for (int k = 0; k < 8; ++k) c[set][y][k / 4][k % 4] = 0;
    }

    // Adds c to sum: a code of 1 stands for `factor`, and upper halves count `times` as much.
    __device__ __forceinline__ void take_products(int u, int times, float factor)
    {
        UNROLL for (int set = 0; set < SETS; ++set) {
            int m = TOGETHER ? j / 2 : 4 * set + j, tile = TOGETHER ? j % 2 : u;
            float unit = m < ROWS ? shared.units[warp][min_of(m, ROWS - 1)][tile] * (factor / times) : 0;
            UNROLL for (int y = 0; y < WIDE; ++y)
                UNROLL for (int h = 0; h < 2; ++h) {
                    const int(&each)[4] = c[set][y][h];
                    sum[set][y][h][0] += unit * (float)(times * each[0] + each[1]);
                    sum[set][y][h][1] += unit * (float)(times * each[2] + each[3]);
                }
        }
    }

    // Adds the values of the tiles u .. u + n of a step.
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

    // Takes a step of two tiles. All reads begin here, as waiting for one of a warp's reads is waiting for all.
    __device__ __forceinline__ void step(int tile)
    {
        int product[ROWS][4];
        float centre_scores[SETS][2], key_widths[4], value_widths[4], s[ROWS][4];
        multiply_signs(product);
        UNROLL for (int set = 0; set < SETS; ++set) multiply_centres(set, centre_scores[set]);
        unpack(key_width, key_widths), unpack(value_width, value_widths);
        load_values(0, tile), load_values(1, tile);
        load_keys(tile + 2);
        load_scales(tile + 2);
        scores(tile, product, centre_scores, key_widths, s);
        set_weights(s, value_widths);
        if (TOGETHER)
            add(0, 2);
        else
            add(0, 1), add(1, 1);
    }

    // Leaves this warp's results to the block.
    __device__ void finish()
    {
        UNROLL for (int set = 0; set < SETS; ++set)
            UNROLL for (int y = 0; y < WIDE; ++y)
                UNROLL for (int k = 0; k < 4; ++k) {
                    float x = sum[set][y][k / 2][k % 2];
                    if (TOGETHER) x += __shfl_xor_sync(ALL_LANES, x, 1);
                    int m = TOGETHER ? j / 2 : 4 * set + j;
                    if (m < ROWS && (!TOGETHER || j % 2 == 0)) shared.parts[warp][m][32 * y + 4 * i + k] = x;
                }
        UNROLL for (int m = 0; m < ROWS; ++m) {
            float all = lane_sum(running_sum[m]), added = lane_sum(offset[m]) * (-0.5f * ((1 << value_bits) - 1));
            if (threadIdx.x % 32 == 0) shared.running_max[warp][m] = running_max[m], shared.running_sum[warp][m] = all, shared.offsets[warp][m] = added;
        }
    }

    static __device__ __forceinline__ void unpack(const uint2& x, float (&y)[4])
    {
        y[0] = half_to_float((u16)x.x), y[1] = half_to_float((u16)(x.x >> 16));
        y[2] = half_to_float((u16)x.y), y[3] = half_to_float((u16)(x.y >> 16));
    }
};

// Does what attend_split does. Queries are the model's; queries.codes (G, HEAD_DIM) are the rotation's signs times the channels'
// factors, queries.scale (G) a factor of the keys' estimates.
__device__ void tiled_split(TiledShared& shared, const Queries& queries, const Store& keys, const Store& values, const Span& span,
                            int split, int n_splits, int g, float* softmax, float (*out)[HEAD_DIM])
{
    int first = span.t0 / TILE, n = divide_up(span.t1, TILE) - first;
    int begin = first + (i64)n * split / n_splits, end = first + (i64)n * (split + 1) / n_splits, warp = threadIdx.x / 32;
    int tile = begin + (end - begin) * warp / WARPS, last = begin + (end - begin) * (warp + 1) / WARPS;
    TiledWarp state(shared, keys, values, span, last, g);
    state.load_keys(tile);
    state.load_scales(tile);
    grid_dependency_wait();  // what is packed was there before this token
    for (int base = 0; base < ROWS; base += HADAMARD_ROWS) {
        for (int k = threadIdx.x; k < HADAMARD_ROWS * HEAD_DIM; k += THREADS) {
            int m = base + k / HEAD_DIM, c = k % HEAD_DIM;
            const float* x = queries.x + ((i64)g * ROWS + m) * HEAD_DIM;
            shared.rotated[k / HEAD_DIM][0][c] = m < ROWS ? x[c] * ((const float*)queries.codes)[g * HEAD_DIM + c] : 0;
        }
        int side = walsh_hadamard(shared.rotated);
        for (int m = base + warp; m < min_of(ROWS, base + HADAMARD_ROWS); m += WARPS)
            round_row(shared, shared.rotated[m - base][side], m, queries.scale[g]);
        __syncthreads();
    }
    state.take_queries();
    for (; tile < last; tile += 2) state.step(tile);
    state.finish();
    __syncthreads();
    for (int k = threadIdx.x; k < ROWS * HEAD_DIM; k += THREADS) {
        int m = k / HEAD_DIM, c = k % HEAD_DIM;
        float largest = MINUS_INFINITY, total = 0, x = 0;
        UNROLL for (int w = 0; w < WARPS; ++w) largest = fmaxf(largest, shared.running_max[w][m]);
        UNROLL for (int w = 0; w < WARPS; ++w) {
            float factor = __expf(shared.running_max[w][m] - (largest == MINUS_INFINITY ? 0 : largest));
            total += factor * shared.running_sum[w][m], x += factor * (shared.parts[w][m][c] + shared.offsets[w][m]);
        }
        out[m][c] = x;
        if (c == 0) softmax[2 * m] = largest, softmax[2 * m + 1] = total;
    }
    __syncthreads();
}
