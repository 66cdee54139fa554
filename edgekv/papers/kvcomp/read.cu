// Keys and values in Huffman-coded blocks of CODE_BLOCK tokens. Store: pool, offsets,
// bits, table, low, step, as in edgekv.kernels.contract.codes. Codes are decoded a tile at a time into shared memory, a thread
// per token, by a table of TABLE_BITS bits that gives several symbols at once; no branch depends on the codes.

#define FLAT_BITS (PLAIN_BITS / (CODE_BLOCK * HEAD_DIM))  // of a code in blocks of fixed-length codes
#define CODE_WORDS divide_up(HEAD_DIM, 4)
#define CODE_STRIDE ((CODE_WORDS + 2) | 1)                // odd: tokens then start in different banks
#define LOOKUPS (57 / TABLE_BITS)                         // of 64 bits that begin anywhere in a byte

struct Tile {
    u64 table[1 << TABLE_BITS];
    u32 codes[TILE][CODE_STRIDE];
};

__device__ __forceinline__ void load_table(Tile& tile, const Store& store)
{
    for (int i = threadIdx.x; i < 1 << TABLE_BITS; i += THREADS) tile.table[i] = ((const u64*)store.d)[i];
    __syncthreads();
}

// 64 bits from bit p of the pool on.
__device__ __forceinline__ u64 peek(const u64* pool, u64 p)
{
    u64 low = pool[p / 64] >> p % 64, high = pool[p / 64 + 1];
    return p % 64 ? low | high << (64 - p % 64) : low;
}

// Bytes go into `row` by words of four. `held` has the last `n_held` < 4 bytes.
struct Writer {
    u32* row;
    u64 held;
    int n_held;

    __device__ __forceinline__ void put(u32 bytes, int n)
    {
        held |= (u64)bytes << 8 * n_held;
        n_held += n;
        *row = (u32)held;
        if (n_held >= 4) ++row, held >>= 32, n_held -= 4;
    }
};

// The tokens of a tile below `end`; threads 0 .. 63. Barriers are the caller's.
__device__ void decode_tile(Tile& tile, const Store& store, int g, int first, int end)
{
    int token = first + threadIdx.x;
    if (threadIdx.x >= TILE || token >= end) return;
    const u16* bits = (const u16*)store.c + (i64)g * store.capacity + token / CODE_BLOCK * CODE_BLOCK;
    u32 before = 0, total = 0;
    for (int i = 0; i < CODE_BLOCK; ++i) {
        if (i == token % CODE_BLOCK) before = total;
        total += bits[i];
    }
    i64 block = (i64)g * (store.capacity / CODE_BLOCK) + token / CODE_BLOCK;
    u64 p = (u64)((const u32*)store.b)[block] * 64 + before;
    const u64* pool = (const u64*)store.a;
    Writer out = {tile.codes[threadIdx.x], 0, 0};
    if (total == PLAIN_BITS) {
        for (int c = 0; c < HEAD_DIM; ++c, p += FLAT_BITS) out.put((u32)peek(pool, p) & ((1u << FLAT_BITS) - 1), 1);
        return;
    }
    for (int c = 0; c < HEAD_DIM;) {
        u64 window = peek(pool, p);
#pragma unroll
        for (int i = 0; i < LOOKUPS; ++i) {
            if (c >= HEAD_DIM) break;
            u64 entry = tile.table[window & ((1 << TABLE_BITS) - 1)];
            int length = entry >> 56 & 15, n = entry >> 60;
            out.put((u32)entry, least(n, 4));
            if (n > 4) out.put((u32)(entry >> 32) & 0xffffff, n - 4);
            window >>= length, p += length, c += n;
        }
    }
}

struct HuffmanKeys {
    static constexpr bool PREPARES = false;
    struct Shared {
        Tile tile;
        float q[ROWS][4 * CODE_WORDS], constant[WARPS][ROWS], s[TILES][ROWS][TILE];
    };
    Shared& shared;
    Store store;
    const float* x;
    int rows, g, end;

    __device__ HuffmanKeys(Shared& shared, const Queries& queries, const Store& store, int g, int m0, int end)
        : shared(shared), store(store), x(queries.x + ((i64)g * queries.rows + m0) * HEAD_DIM), rows(queries.rows - m0), g(g),
          end(end)
    {
        load_table(shared.tile, store);
    }

    __device__ void load(int u, int tile) {}

    __device__ void prepare(int tile) {}

    // Queries times the steps of the channels of one block, and what its low ends give.
    __device__ void lift_queries(i64 block)
    {
        float constant[ROWS] = {};
        for (int c = threadIdx.x; c < 4 * CODE_WORDS; c += THREADS) {
            bool there = c < HEAD_DIM;
            float step = there ? half_to_float(((const u16*)store.f)[block * HEAD_DIM + c]) * (LIFT / (1 << c % 2 * 8)) : 0;
            float low = there ? half_to_float(((const u16*)store.e)[block * HEAD_DIM + c]) : 0;
#pragma unroll
            for (int m = 0; m < ROWS; ++m) {
                float q = there && m < rows ? x[(i64)m * HEAD_DIM + c] : 0;
                shared.q[m][c] = q * step;
                constant[m] += q * low;
            }
        }
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            constant[m] = lane_sum(constant[m]);
            if (threadIdx.x % 32 == 0) shared.constant[threadIdx.x / 32][m] = constant[m];
        }
    }

    __device__ void scores(int u, int tile)
    {
        if (u > 0) __syncthreads();
        decode_tile(shared.tile, store, g, tile * TILE, end);
        int t = threadIdx.x / 2, half = threadIdx.x % 2;  // two threads share a token
        for (int first = 0; first < TILE && tile * TILE + first < end; first += CODE_BLOCK) {
            __syncthreads();
            i64 blocks = store.capacity / CODE_BLOCK;
            lift_queries(g * blocks + (tile * TILE + first) / CODE_BLOCK);
            __syncthreads();
            float sum[ROWS] = {};
            for (int w = half; w < CODE_WORDS; w += 2) {
                u32 word = shared.tile.codes[t][w];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float code = __uint_as_float(word >> i / 2 * 16 & 255u << i % 2 * 8);
#pragma unroll
                    for (int m = 0; m < ROWS; ++m) sum[m] = multiply_add(shared.q[m][4 * w + i], code, sum[m]);
                }
            }
#pragma unroll
            for (int m = 0; m < ROWS; ++m) {
                sum[m] += __shfl_xor_sync(EVERY_LANE, sum[m], 1);
                float constant = 0;
                for (int i = 0; i < WARPS; ++i) constant += shared.constant[i][m];
                if (half == 0 && t >= first && t < first + CODE_BLOCK) shared.s[u][m][t] = sum[m] * SINK + constant;
            }
        }
    }

    __device__ float score(int u, int m, int i) const { return shared.s[u][m][i]; }
};

struct HuffmanValues {
    static constexpr int MINE = divide_up(CODE_WORDS, 32);  // words of a token that a lane takes; a warp takes 16 tokens
    struct Shared {
        Tile tile;
        float w[TILES][ROWS][TILE], offset[WARPS][ROWS];
    };
    Shared& shared;
    Store store;
    int g, end;
    float offset[TURNS_OF_ITEMS], scale[2], low[2];
    float sum[ROWS * MINE * 4];

    __device__ HuffmanValues(Shared& shared, const Store& store, int g, int end)
        : shared(shared), store(store), g(g), end(end)
    {
        for (int i = 0; i < TURNS_OF_ITEMS; ++i) offset[i] = 0;
        for (int i = 0; i < ROWS * MINE * 4; ++i) sum[i] = 0;
        load_table(shared.tile, store);
    }

    __device__ void load(int u, int tile)
    {
        if (u != MY_TILE) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int token = tile * TILE + threadIdx.x % 32 + 32 * i;
            i64 at = (i64)g * store.capacity + token;
            scale[i] = token < end ? half_to_float(((const u16*)store.f)[at]) : 0;
            low[i] = token < end ? half_to_float(((const u16*)store.e)[at]) : 0;
        }
    }

    __device__ void weigh(int u, int m, int turn, float p0, float p1)
    {
        shared.w[u][m][threadIdx.x % 32] = p0 * scale[0] * LIFT;
        shared.w[u][m][threadIdx.x % 32 + 32] = p1 * scale[1] * LIFT;
        offset[turn] += p0 * low[0] + p1 * low[1];
    }

    __device__ void add(int u, int tile)
    {
        decode_tile(shared.tile, store, g, tile * TILE, end);
        __syncthreads();
        int warp = threadIdx.x / 32, last = least(TILE, end - tile * TILE);
        for (int t = warp * (TILE / WARPS); t < least(last, (warp + 1) * (TILE / WARPS)); ++t) {
            float w[ROWS];
#pragma unroll
            for (int m = 0; m < ROWS; ++m) w[m] = shared.w[u][m][t];
#pragma unroll
            for (int k = 0; k < MINE; ++k) {
                u32 word = shared.tile.codes[t][least(threadIdx.x % 32 + 32 * k, CODE_WORDS - 1)];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float code = __uint_as_float(word >> i / 2 * 16 & 255u << i % 2 * 8);
#pragma unroll
                    for (int m = 0; m < ROWS; ++m) {
                        float& total = sum[(m * MINE + k) * 4 + i];
                        total = multiply_add(w[m], code, total);
                    }
                }
            }
        }
        __syncthreads();
    }

    __device__ void finish(float (*out)[HEAD_DIM])
    {
        add_by_row<TILES>(offset, shared.offset);
        for (int warp = 0; warp < WARPS; ++warp) {
            __syncthreads();
            if ((int)threadIdx.x / 32 != warp) continue;
#pragma unroll
            for (int m = 0; m < ROWS; ++m)
#pragma unroll
                for (int k = 0; k < MINE; ++k)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        int c = 4 * (threadIdx.x % 32 + 32 * k) + i;
                        float extra = shared.offset[warp][m];
                        if (c < HEAD_DIM) out[m][c] += sum[(m * MINE + k) * 4 + i] * (SINK / (1 << i % 2 * 8)) + extra;
                    }
        }
        __syncthreads();
    }
};
