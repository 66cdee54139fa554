// Keys and values in Huffman-coded blocks of CODE_BLOCK tokens, as rows (rows.cu). Store: pool, offsets, bits, table, low, step, as
// in edgekv.papers.kvcomp.reference. Codes are decoded a tile at a time into shared memory, a thread per token, by a table of
// TABLE_BITS bits that gives several symbols at once; no branch depends on the codes.

#define FLAT_BITS (PLAIN_BITS / (CODE_BLOCK * HEAD_DIM))  // of a code in blocks of fixed-length codes
#define CODE_STRIDE (divide_up(HEAD_DIM, 4) + 2 | 1)      // words, odd: tokens then start in different banks
#define LOOKUPS (57 / TABLE_BITS)                         // of 64 bits that begin anywhere in a byte

// Writes bytes to `row` by words of four; `pending` has the last n_pending < 4 bytes.
struct Writer {
    u32* row;
    u64 pending;
    int n_pending;

    __device__ __forceinline__ void put(u32 bytes, int n)
    {
        pending |= (u64)bytes << 8 * n_pending;
        n_pending += n;
        *row = (u32)pending;
        if (n_pending >= 4) ++row, pending >>= 32, n_pending -= 4;
    }
};

// PER_TOKEN: each token has a low and a step; otherwise each channel of a block has.
template <bool PER_TOKEN> struct HuffmanRow : ChannelRow<HEAD_DIM> {
    static constexpr bool STAGES = true;
    static constexpr int WORDS = 1 + (PER_TOKEN ? 1 : VEC);
    struct Shared {
        u64 table[1 << TABLE_BITS];
        u32 codes[TILE][CODE_STRIDE];
    };
    Shared& tables;
    Store store;
    int g, last;

    __device__ HuffmanRow(Shared& shared, const Store& store, int g, int end) : tables(shared), store(store), g(g), last(end)
    {
        for (int i = threadIdx.x; i < 1 << TABLE_BITS; i += THREADS) tables.table[i] = ((const u64*)store.d)[i];
    }

    // Returns 64 bits of the pool from bit p on.
    __device__ __forceinline__ u64 peek(u64 p) const
    {
        const u64* from = (const u64*)store.a + p / 64;
        return p % 64 ? from[0] >> p % 64 | from[1] << (64 - p % 64) : from[0];
    }

    __device__ void stage(int tile)
    {
        int token = tile * TILE + threadIdx.x;
        if (threadIdx.x >= TILE || token >= last) return;
        const u16* bits = (const u16*)store.c + (i64)g * store.capacity + token / CODE_BLOCK * CODE_BLOCK;
        u32 before = 0, total = 0;
        for (int i = 0; i < CODE_BLOCK; ++i) {
            if (i == token % CODE_BLOCK) before = total;
            total += bits[i];
        }
        u64 p = (u64)((const u32*)store.b)[(i64)g * (store.capacity / CODE_BLOCK) + token / CODE_BLOCK] * 64 + before;
        Writer out = {tables.codes[threadIdx.x], 0, 0};
        if (total == PLAIN_BITS) {
            for (int c = 0; c < WIDTH; ++c, p += FLAT_BITS) out.put((u32)peek(p) & ((1u << FLAT_BITS) - 1), 1);
            return;
        }
        for (int c = 0; c < WIDTH;) {
            u64 window = peek(p);
UNROLL for (int i = 0; i < LOOKUPS; ++i) {
                if (c >= WIDTH) break;
                u64 entry = tables.table[window & ((1 << TABLE_BITS) - 1)];
                int length = entry >> 56 & 15, n = entry >> 60;
                out.put((u32)entry, min_of(n, 4));
                if (n > 4) out.put((u32)(entry >> 32) & 0xffffff, n - 4);
                window >>= length, p += length, c += n;
            }
        }
    }

    __device__ void load(int token, int unit, u32* words) const
    {
        const u8* codes = (const u8*)tables.codes[token % TILE] + unit * VEC;
        words[0] = 0;
        for (int j = 0; j < VEC; ++j) words[0] |= (u32)codes[j] << 8 * j;
        i64 at = ((i64)g * (store.capacity / CODE_BLOCK) + token / CODE_BLOCK) * WIDTH + unit * VEC;
        if (PER_TOKEN) at = (i64)g * store.capacity + token;
        for (int j = 0; j < WORDS - 1; ++j) words[1 + j] = ((const u16*)store.f)[at + j] | (u32)((const u16*)store.e)[at + j] << 16;
    }

    __device__ void decode(const u32* words, int token, int unit, float* x) const
    {
UNROLL for (int j = 0; j < VEC; ++j) {
            u32 ends = words[PER_TOKEN ? 1 : 1 + j];
            x[j] = half_to_float((u16)(ends >> 16)) + half_to_float((u16)ends) * (float)(words[0] >> 8 * j & 255);
        }
    }
};
