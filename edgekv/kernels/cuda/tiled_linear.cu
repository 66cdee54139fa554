// Products of packed weights (rows, columns), with BLOCK_INPUTS to a scale (levels.cu), and an activation on tensor cores, from sm_80 on.
//
//     digit   8 bits: an input, rotated for levels, is an integer of two digits; weights are the stored integers, or levels
//     scale   of the inputs' integers (input_scale): one for each chunk's inputs, or for each block's of rotated ones
//     chunk   16 bytes of a row
//     span    8 chunks, whole cache lines
//     tile    16 rows, or 8 rows and the 8 that they gate; at most MAX_SPANS spans
//     team    WARPS_OF_TILE warps that share a tile's spans
//     step    k = 0 and 1, in which a warp multiplies a span, which its lanes read, by inputs in shared memory:
//
//     rows     chunks 0, 1    2, 3    4, 5    6, 7   |   columns        0     1     2     3     4     5     6     7
//     0, 8     lane 0         1       2       3      |   chunk k        high  low   0     0     0     0     0     0
//     1, 9     lane 4         5       6       7      |   chunk 2 + k    0     0     high  low   0     0     0     0
//     ...                                            |   chunk 4 + k    0     0     0     0     high  low   0     0
//     7, 15    lane 28        29      30      31     |   chunk 6 + k    0     0     0     0     0     0     high  low
//
// Lane 4 i + j has chunks 2 j and 2 j + 1 of rows i and i + 8, and gets columns 2 j and 2 j + 1 of their sums: those of its chunks.

#define PER_LOAD (128 / PLANE_BITS)   // inputs of a chunk
#define FOURS (PER_LOAD / 4)          // threads that put a chunk into shared memory
#define HALVES (8 / PLANE_BITS)       // times 16 bytes of digits to a chunk and digit
#define SCALES (BLOCK_INPUTS >= 2 * PER_LOAD ? 1 : 2)  // scales of a lane's chunks in a row
#define TEAMS (N_WARPS / WARPS_OF_TILE)
#define AHEAD 2                       // spans that a warp reads ahead
#define LARGEST 32639                 // 127 * 256 + 127
#define GROUP (ROTATED ? 4 : 1)       // fours of inputs that a thread puts into shared memory together
// Fours that a thread reads at once.
#define BATCH min_of(HAS_SECOND_PLANE ? 4 : 8, GROUP * divide_up(MAX_SPANS * 8 * FOURS, 32 * N_WARPS * GROUP))
#define EVEN (BLOCK_INPUTS / PER_LOAD % 2 == 0)  // whether rows have even numbers of chunks
#define TABLES (ROTATED && WEIGHT_BITS != 5 ? 2 : 1)  // of levels: the second one's are in the upper bytes of its words
#define COPIES (32 / (WEIGHT_BITS == 5 ? 2 : 1))  // of each entry of a table, which lanes read without conflicts

struct Chunk {
    float input_scale;
    int offset;  // what the weights' zero adds to their sum
};

// Returns the chunk of four f of a row (`put_digits`).
__device__ __forceinline__ int chunk_at(int f) { return ROTATED ? f / 32 * PLANE_BITS + f % (8 * PLANE_BITS) / 8 : f / FOURS; }

// Returns the group of the k-th four that a thread reads after the first `base` of a row: groups go to the threads in order.
__device__ __forceinline__ int group_at(int base, int k) { return base / GROUP + k / GROUP * 32 * N_WARPS + threadIdx.x; }

// Returns that four. A rotated block has 32 fours, in 8 groups: u, u + 8, u + 16 and u + 24 are group u.
__device__ __forceinline__ int four_at(int base, int k)
{
    int group = group_at(base, k);
    return ROTATED ? group / 8 * 32 + k % 4 * 8 + group % 8 : group;
}

// The lowest 16 bits of x + ROUNDS are those of round(x) + 0x8080: two digits, each plus 128.
#define ROUNDS 12615808.0f

__device__ __forceinline__ u32 two_digits(float x, float inverse) { return __float_as_uint(x * inverse + ROUNDS); }

// Puts both digits of each input of four f of a row in their places. Here a rotated block's four f has inputs a, a + 64, a + 1 and
// a + 65, a = 2 f.
__device__ __forceinline__ void put_digits(u8* staged, int f, const u32 (&x)[4])
{
    int chunk = chunk_at(f), step = chunk / 8 * 2 + chunk % 2, column = chunk % 8 / 2 * 2;
    u32 x01 = prmt(x[0], x[1], 0x5140), x23 = prmt(x[2], x[3], 0x5140);
    UNROLL for (int d = 0; d < 2; ++d) {
        u32 digits = prmt(x01, x23, d ? 0x5410 : 0x7632) ^ 0x80808080;
        if (ROTATED) {
            int half = f % 32 / (8 * PLANE_BITS) * 2 + f % 8 / 4, slot = (step * HALVES + half) * 8 + column + d;
            *(u32*)(staged + slot * 16 + f % 4 * 4) = digits;
        } else if (WEIGHT_BITS == 8) {
            *(u32*)(staged + ((step * 8 + column + d) * 16 + f % 4 * 4)) = digits;
        } else {  // a word of weights has even inputs in its low nibbles
            int word = f % FOURS / 2, slot = (step * HALVES + word / 2) * 8 + column + d;
            u8* to = staged + slot * 16 + word % 2 * 8 + f % 2 * 2;
            *(u16*)to = (u16)prmt(digits, 0, 0x20), *(u16*)(to + 4) = (u16)prmt(digits, 0, 0x31);
        }
    }
}

// Loads inputs k .. k + 3 of x, 0 from `columns` on, whole fours.
__device__ __forceinline__ void load_four(const float* x, int k, int columns, float (&v)[4])
{
    float4 a = {0, 0, 0, 0};
    if (k < columns) a = *(const float4*)(x + k);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
}

// Where a lane's two rows of a tile begin, in bytes of the weights and in scales.
struct Rows {
    u32 weights[2], scales[2];
};

// 32 bytes of each of a lane's two rows.
struct WeightFragment {
    u32 words[2][2][4];  // row, chunk
    u32 second_plane[2][4];  // of a row's block
    u32 scale[2][SCALES];  // as stored, so that nothing waits for them before they are used

    // Reads chunks `at` and at + 1.
    __device__ __forceinline__ void load(const u8* weights, const void* scales, const Rows& rows, u32 chunks, u32 at)
    {
        at = min_of(at, chunks - (EVEN ? 2 : 1));
        u32 has_next = EVEN || at + 1 < chunks ? 1 : 0, block = HAS_SECOND_PLANE * (at / PLANE_BITS);
        UNROLL for (int r = 0; r < 2; ++r) {
            u32 from = rows.weights[r] + (at + block) * 16;
            UNROLL for (int h = 0; h < 2; ++h) load_words<4>(weights + (from + h * has_next * 16), words[r][h]);
            if (HAS_SECOND_PLANE) load_words<4>(weights + (rows.weights[r] + ((block + 1) * PLANE_BITS + block) * 16), second_plane[r]);
            UNROLL for (int h = 0; h < SCALES; ++h)
                scale[r][h] = scale_at(scales, rows.scales[r] + (at + h * has_next) * PER_LOAD / BLOCK_INPUTS);
        }
    }

    // Adds the products with a span's digits, those of this lane's column, to sum[r].
    __device__ __forceinline__ void multiply(const u32* table, const uint4* digits, bool has_part, const Chunk* chunk,
                                             float (&sum)[2]) const
    {
        int c[2][4];
        UNROLL for (int k = 0; k < 2; ++k) {
            UNROLL for (int n = 0; n < 4; ++n) c[k][n] = ROTATED || n % 2 == 0 ? 0 : chunk[k].offset;
            UNROLL for (int h = 0; h < HALVES; ++h) {
                uint4 b = {0, 0, 0, 0};
                if (has_part) b = digits[(k * HALVES + h) * 8];
                UNROLL for (int i = 0; i < 2; ++i) {
                    u32 x[2][2 * TABLES];
                    UNROLL for (int r = 0; r < 2; ++r) decode(table, r, k, h, i, x[r]);
                    UNROLL for (int n = 0; n < TABLES; ++n) {
                        u32 a[4] = {x[0][n], x[1][n], x[0][TABLES + n], x[1][TABLES + n]};
                        if (ROTATED)
                            mma_s8s8(c[k], a, i ? b.z : b.x, i ? b.w : b.y);
                        else
                            mma_u8s8(c[k], a, i ? b.z : b.x, i ? b.w : b.y);
                    }
                }
            }
        }
        UNROLL for (int n = 0; n < 4; ++n) c[0][n] += ROTATED ? c[1][n] : 0;  // both chunks of one block
        UNROLL for (int k = 0; k < (ROTATED ? 1 : 2); ++k) {
            UNROLL for (int r = 0; r < 2; ++r) {
                float both_scales = chunk[k].input_scale * scale_of(scale[r][k % SCALES]);
                sum[r] += (float)(256 * c[k][2 * r] + c[k][2 * r + 1]) * both_scales;
            }
        }
    }

    // Sets x to the two words of chunk k of row r that product i of half h takes. With two tables these are four: the lower and the
    // upper bytes of the first word, and of the second one, with 0 in their other bytes.
    __device__ __forceinline__ void decode(const u32* table, int r, int k, int h, int i, u32 (&x)[2 * TABLES]) const
    {
        int t = h % 2 * 2 + i, q = h / 2 * 8 + (2 * (threadIdx.x % 4) + k) % PLANE_BITS * 4 + t;
        u32 word = words[r][k][t], at[4];
        if (ROTATED) find_levels<COPIES>(table, word, second_plane[r][t], q, at);
        UNROLL for (int n = 0; n < 2; ++n) {
            u32 low = ROTATED ? shared_word(table, at[2 * n]) : 0;
            u32 high = ROTATED ? shared_word<(TABLES - 1) * 4 * ENTRIES * COPIES>(table, at[2 * n + 1]) : 0;
            if (TABLES == 2)
                x[n * TABLES] = low, x[n * TABLES + TABLES - 1] = high;
            else if (ROTATED)
                x[n] = prmt(low, high, 0x5410);
            else
                x[n] = WEIGHT_BITS == 8 ? words[r][k][2 * i + n] : word >> 4 * n & 0x0f0f0f0f;
        }
    }
};

// Returns the largest size of N numbers of each of `lanes` neighbouring lanes, NaN if one is: then a chunk's scale and its sums are.
template <int N> __device__ __forceinline__ float largest_of(const float* x, int lanes)
{
    float largest = 0;
    UNROLL for (int i = 0; i < N; ++i) largest = MaximumOrNaN::of(largest, fabsf(x[i]));
    return reduce_lanes<MaximumOrNaN>(largest, lanes);
}

__device__ __forceinline__ float inverse_scale(float largest) { return largest > 1e-30f ? LARGEST / largest : 0; }

// Rounds four inputs to 16 bits and stores their digits where the products read them.
__device__ __forceinline__ void put_four(u8* staged, Chunk* chunk_of, int f, int fours, const float (&x)[4])
{
    float largest = largest_of<4>(x, FOURS), inverse = inverse_scale(largest);
    u32 whole[4];
    u32 total = 0;
    UNROLL for (int k = 0; k < 4; ++k) total += (whole[k] = two_digits(x[k], inverse)) - __float_as_uint(ROUNDS);
    total = lane_sum(total, FOURS);
    if (f >= fours) return;
    put_digits(staged, f, whole);
    Chunk chunk = {largest * (1.0f / LARGEST), -CODE_OF_ZERO * (int)total};
    if (f % FOURS == 0) chunk_of[chunk_at(f)] = chunk;
}

// Rotates the 16 inputs of group u of a row, rounds them to 16 bits and stores their digits where the products read them.
__device__ __forceinline__ void put_rotated(u8* staged, Chunk* chunk_of, int u, int fours, float (&x)[4][4])
{
    rotate_sixteen(x);
    float largest = largest_of<16>(x[0], 8), inverse = inverse_scale(largest);
    if (4 * u >= fours) return;
    UNROLL for (int k = 0; k < 2; ++k) {
        UNROLL for (int i = 0; i < 4; i += 2) {
            u32 whole[4];
            UNROLL for (int n = 0; n < 4; ++n) whole[n] = two_digits(x[k + n % 2 * 2][i + n / 2], inverse);
            put_digits(staged, u / 8 * 32 + 2 * (u % 8 + 8 * k) + i / 2, whole);
        }
    }
    Chunk chunk = {largest * (ROOT / LARGEST), 0};
    if (u % 8 < PLANE_BITS) chunk_of[u / 8 * PLANE_BITS + u % 8] = chunk;
}

// y[n, r] = onto[n, r] + bias[r] + sum over k of weights[r, k] * x[n, k]; bias, onto and norm may be null. With a norm x[n, k] is
// times norm[k], over the root of the mean square of x[n] plus eps. With a gate of 0 or more, y[n, r] is the activation of that
// number of row r's sum, times row `rows` + r's. Grid (any, n).
extern "C" __global__ void __launch_bounds__(32 * N_WARPS)
tiled_matvec(const u8* weights, const void* scales, const float* bias, const float* onto, const float* norm, float eps, int gate,
             const float* x, int rows, int columns, int blocks, float* y)
{
    __shared__ uint4 staged[MAX_SPANS * 2 * HALVES * 8];
    __shared__ Chunk chunk_of[MAX_SPANS * 8];
    __shared__ float sums[TEAMS][2][WARPS_OF_TILE][16], warp_squares[N_WARPS];
    int chunks = blocks * BLOCK_INPUTS / PER_LOAD, spans = divide_up(chunks, 8), fours = spans * 8 * FOURS;
    int lane = threadIdx.x % 32, i = lane / 4, j = lane % 4;
    int team = threadIdx.x / (32 * WARPS_OF_TILE), warp = threadIdx.x / 32 % WARPS_OF_TILE;
    bool gated = gate >= 0;
    int outputs = gated ? 8 : 16, tiles = divide_up(rows, outputs);
    int row_offset = gated ? rows : 8, last_row = gated ? 2 * rows - 1 : rows - 1;  // offset: from a lane's first row to its second
    int stride = gridDim.x * TEAMS, tile = team * gridDim.x + blockIdx.x, span = warp;  // to be computed
    int tile_ahead = tile, span_ahead = span;  // to be read
    WeightFragment ring[AHEAD];
    Rows from;
    auto find_rows = [&](int tile) {
        UNROLL for (int r = 0; r < 2; ++r) {
            u32 row = min_of(tile * outputs + i + r * row_offset, last_row);
            from.weights[r] = row * (chunks + HAS_SECOND_PLANE * blocks) * 16, from.scales[r] = row * blocks;
        }
    };
    find_rows(tile_ahead);
    auto load_next = [=, &tile_ahead, &span_ahead, &from](WeightFragment& fragment) {
        if (tile_ahead < tiles) fragment.load(weights, scales, from, chunks, 8 * span_ahead + 2 * j);
        span_ahead += WARPS_OF_TILE;
        if (span_ahead >= spans) span_ahead = warp, find_rows(tile_ahead += stride);
    };
    x += (i64)blockIdx.y * columns, y += (i64)blockIdx.y * rows, onto += onto ? (i64)blockIdx.y * rows : 0;
    DYNAMIC_SHARED(uint4, memory, 1 << 12);
    u32* table = (u32*)memory;
    launch_dependents();
    UNROLL for (int a = 0; a < AHEAD; ++a) load_next(ring[a]);
    if (ROTATED) fill_levels<COPIES, TABLES>(table, 0);
    float v[BATCH][4], weight[BATCH][4], sum_of_squares = 0;
    auto load_norm = [&](int base) {
        UNROLL for (int k = 0; k < BATCH; ++k) load_four(norm, 4 * four_at(base, k), columns, weight[k]);
    };
    bool norm_early = BATCH <= 4;  // while registers last
    if (norm && norm_early) load_norm(0);
    grid_dependency_wait();
    for (int base = 0; group_at(base, 0) - lane < fours / GROUP; base += BATCH * 32 * N_WARPS) {
        UNROLL for (int k = 0; k < BATCH; ++k) load_four(x, 4 * four_at(base, k), columns, v[k]);
        if (norm && (base || !norm_early)) load_norm(base);
        if (norm) {
            UNROLL for (int k = 0; k < BATCH; ++k) {
                UNROLL for (int i = 0; i < 4; ++i) sum_of_squares += v[k][i] * v[k][i], v[k][i] *= weight[k][i];
            }
        }
        UNROLL for (int k = 0; k < BATCH; ++k) {
            if (!ROTATED) put_four((u8*)staged, chunk_of, four_at(base, k), fours, v[k]);
            if (ROTATED && k % 4 == 3 && group_at(base, k) - lane < fours / GROUP)
                put_rotated((u8*)staged, chunk_of, group_at(base, k), fours, *(float (*)[4][4])(v + k - 3));
        }
    }
    if (norm) warp_squares[threadIdx.x / 32] = lane_sum(sum_of_squares);
    __syncthreads();
    sum_of_squares = 0;
    if (norm) {
        UNROLL for (int w = 0; w < N_WARPS; ++w) sum_of_squares += warp_squares[w];
    }
    float factor = norm ? 1 / sqrtf(sum_of_squares / columns + eps) : 1;

    float(*parts)[WARPS_OF_TILE][16] = sums[team];
    bool has_part = i / 2 == j;  // whether this lane's chunk is in its column
    int turn = 0, k = lane % 16;
    float sum[2] = {}, added = 0, residual = 0;  // bias and residual, which the warp that adds them reads ahead
    bool adds = warp == 0 && tile < tiles;
    while (tile < tiles) {
        UNROLL for (int a = 0; a < AHEAD; ++a) {
            if (tile >= tiles) break;
            if (adds) {
                int first = tile * outputs;
                if (bias) added = bias[min_of(gated && k >= 8 ? rows + first + k - 8 : first + k, last_row)];
                if (onto && lane < outputs && first + lane < rows) residual = onto[first + lane];
                adds = false;
            }
            ring[a].multiply(table, staged + i + span * 2 * HALVES * 8, has_part, chunk_of + 8 * span + 2 * j, sum);
            load_next(ring[a]);
            span += WARPS_OF_TILE;
            if (span < spans) continue;
            sum[0] = lane_sum(sum[0], 4), sum[1] = lane_sum(sum[1], 4);
            if (j == 0) parts[turn % 2][warp][i] = sum[0], parts[turn % 2][warp][i + 8] = sum[1];
            meet(team, 32 * WARPS_OF_TILE);
            if (warp == turn % WARPS_OF_TILE) {
                int first = tile * outputs;
                float total = 0;
                UNROLL for (int w = 0; w < WARPS_OF_TILE; w += 2)
                    if (w + lane / 16 < WARPS_OF_TILE) total += parts[turn % 2][w + lane / 16][k];
                total = (total + __shfl_xor_sync(ALL_LANES, total, 16)) * factor + added;
                float up = __shfl_xor_sync(ALL_LANES, total, 8);
                if (gated) total = activate(total, gate) * up;
                if (lane < outputs && first + lane < rows) y[first + lane] = total + residual;
            }
            sum[0] = sum[1] = 0, ++turn;
            span = warp, tile += stride;
            adds = warp == turn % WARPS_OF_TILE && tile < tiles;
        }
    }
}
