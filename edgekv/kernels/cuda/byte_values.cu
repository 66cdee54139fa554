// Values as rows of small integers, BITS wide, signed where 8 bits are FROM_MIDDLE. Byte j of a token's
// HEAD_DIM * BITS / 8 holds the elements j, j + n_bytes, ... from its low bits up. A value is code * scale + offset, where
// VALUE_SCALES says what a token's scale and offset are.

#define FROM_ZERO 0    // int4: store.b is delta (u16), store.c the zero point (u8)
#define FROM_MIDDLE 1  // sym: store.b is the scale (u16)
#define FROM_LOW 2     // kivi: store.b is the step (u16), store.c the low end (u16)

template <int BITS> struct ByteValues {
    static constexpr int PARTS = 8 / BITS;
    static constexpr int BYTES = HEAD_DIM / PARTS;  // of a token
    static constexpr int VEC = common_divisor(BYTES, least(16, power_below(most(1, (ROWS > 2 ? 64 : 32) / (PARTS * ROWS)))));
    static constexpr int WORDS = divide_up(VEC, 4);
    static constexpr int PER_WORD = least(VEC, 4);
    static constexpr int LANES = least(32, power_above(BYTES / VEC));
    static constexpr int PIECES = divide_up(BYTES, VEC * LANES);
    static constexpr int PER_ROW = PIECES * VEC * PARTS;  // sums that a thread keeps for a query
    static constexpr int AT_ONCE = least(TILE, THREADS / LANES);
    static constexpr int TURNS = TILE / AT_ONCE;
    static constexpr int CHUNK = least(TURNS, power_below(most(1, 32 / (PIECES * WORDS))));

    struct Shared {
        float w[TILES][ROWS][TILE], offset[WARPS][ROWS];
    };
    Shared& shared;
    Store store;
    const u8* codes;
    i64 first;  // of the head's scales
    int end, lane, slot;
    u32 raw[TILES][CHUNK][PIECES][WORDS];
    float scale[2], low[2];        // of the tokens that this lane weighs
    float offset[TURNS_OF_ITEMS];  // of what this warp weighs
    float sum[ROWS * PER_ROW];

    __device__ ByteValues(Shared& shared, const Store& store, int g, int end)
        : shared(shared), store(store), codes((const u8*)store.a + (i64)g * store.capacity * BYTES),
          first((i64)g * store.capacity), end(end), lane(threadIdx.x % LANES), slot(threadIdx.x / LANES)
    {
        for (int i = 0; i < TURNS_OF_ITEMS; ++i) offset[i] = 0;
        for (int i = 0; i < ROWS * PER_ROW; ++i) sum[i] = 0;
    }

    __device__ int byte(int piece) const { return (piece * LANES + lane) * VEC; }

    __device__ void load(int u, int tile, int chunk = 0)
    {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            int token = tile * TILE + (chunk * CHUNK + i) * AT_ONCE + slot;
#pragma unroll
            for (int k = 0; k < PIECES; ++k) {
                const u8* from = codes + (i64)token * BYTES + byte(k);
                if (token >= end || slot >= AT_ONCE || byte(k) >= BYTES) {
                    for (int w = 0; w < WORDS; ++w) raw[u][i][k][w] = 0;
                } else if (VEC >= 4) {
                    load_words<WORDS>(from, raw[u][i][k]);
                } else {
                    raw[u][i][k][0] = VEC == 2 ? *(const u16*)from : *from;
                }
                if (BITS == 8 && VALUE_SCALES == FROM_MIDDLE)
                    for (int w = 0; w < WORDS; ++w) raw[u][i][k][w] ^= 0x80808080u;
            }
        }
        if (chunk > 0 || u != MY_TILE) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int token = tile * TILE + threadIdx.x % 32 + 32 * i;
            bool there = token < end;
            scale[i] = there ? half_to_float(((const u16*)store.b)[first + token]) : 0;
            low[i] = 0;
            if (there && VALUE_SCALES == FROM_ZERO) low[i] = -scale[i] * ((const u8*)store.c)[first + token];
            if (there && VALUE_SCALES == FROM_LOW) low[i] = half_to_float(((const u16*)store.c)[first + token]);
            if (VALUE_SCALES == FROM_MIDDLE) low[i] = -scale[i] * (1 << (BITS - 1));
        }
    }

    __device__ void weigh(int u, int m, int turn, float p0, float p1)
    {
        shared.w[u][m][threadIdx.x % 32] = p0 * scale[0] * LIFT;
        shared.w[u][m][threadIdx.x % 32 + 32] = p1 * scale[1] * LIFT;
        offset[turn] += p0 * low[0] + p1 * low[1];
    }

    __device__ void rescale(int m, float factor)
    {
#pragma unroll
        for (int i = 0; i < PER_ROW; ++i) sum[m * PER_ROW + i] *= factor;
    }

    __device__ void rescale_offset(int turn, float factor) { offset[turn] *= factor; }

    __device__ void add(int u, int tile)
    {
        for (int chunk = 0; chunk < TURNS / CHUNK; ++chunk) {
            if (chunk > 0) load(u, tile, chunk);
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) {
                int token = (chunk * CHUNK + i) * AT_ONCE + slot;
                if (slot >= AT_ONCE) continue;
                float w[ROWS];
#pragma unroll
                for (int m = 0; m < ROWS; ++m) w[m] = shared.w[u][m][token];
#pragma unroll
                for (int k = 0; k < PIECES; ++k)
#pragma unroll
                    for (int b = 0; b < VEC; ++b)
#pragma unroll
                        for (int part = 0; part < PARTS; ++part) {
                            u32 word = raw[u][i][k][b / 4] >> b % 4 / 2 * 16;
                            float code = __uint_as_float(word & ((1u << BITS) - 1) << position(b, part));
#pragma unroll
                            for (int m = 0; m < ROWS; ++m) {
                                float& total = sum[m * PER_ROW + (k * VEC + b) * PARTS + part];
                                total = multiply_add(w[m], code, total);
                            }
                        }
            }
        }
    }

    static constexpr __device__ int position(int b, int part) { return b % 2 * 8 + part * BITS; }

    __device__ void finish(float (*out)[HEAD_DIM])
    {
        add_by_row<TILES>(offset, shared.offset);
        typedef SpreadSum<ROWS * PER_ROW, LANES, 32> Sums;
        int kept = 0;
        bool mine = true;
        Sums::run(sum, kept, mine);
        for (int warp = 0; warp < WARPS; ++warp) {
            bool turn = mine && (int)threadIdx.x / 32 == warp;
#pragma unroll
            for (int i = 0; i < Sums::kept(); ++i) {
                int part = (kept + i) % PARTS, b = (kept + i) / PARTS % VEC, k = (kept + i) / PARTS / VEC % PIECES;
                int m = (kept + i) / PER_ROW, c = byte(k) + b + part * BYTES;
                float extra = shared.offset[warp][m];
                if (turn && byte(k) < BYTES) out[m][c] += sum[i] * (SINK / (1 << position(b, part))) + extra;
            }
            __syncthreads();
        }
    }
};
