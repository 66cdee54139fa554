// Keys as small integers, BITS wide, token by token. Codes are (G, capacity, KEY_DIM * BITS / 8) bytes; byte j holds the elements j, j + n_bytes, ... from its low bits up.
// KEY_SCALES says what they stand for; 8 bits of SCALE_PER_TOKEN are signed.

#define SCALE_PER_TOKEN 0  // sym: (code - middle) * store.b[token]
#define STEP_PER_CHANNEL 1  // kivi: store.c[block, channel] + code * store.b[block, channel]

template <int BITS> struct ColumnKeys {
    static constexpr int PARTS = 8 / BITS;
    static constexpr int BYTES = KEY_DIM / PARTS;
    static constexpr int TURNS = divide_up(BYTES, 8);  // a warp reads 4 rows of 32 tokens at a time, two warps share 32 tokens
    static constexpr int CHUNK = least(TURNS, 16);
    static constexpr bool PREPARES = KEY_SCALES == STEP_PER_CHANNEL;
    static constexpr int SLICES = PREPARES ? 2 * TILES : 1;  // of 32 tokens, with queries of their own

    struct Shared {
        float q[SLICES][ROWS][KEY_DIM];       // times what the channel's codes count, and LIFT
        float constant[2 * TILES][2][ROWS];   // [32 tokens][warp of the pair]: the same for all tokens
        float s[2][TILES][ROWS][TILE];        // [warp of the pair]
    };
    Shared& shared;
    Store store;
    const float* x;  // of query m0
    int rows, end, g, block, pair, quad, strip;
    u32 raw[TILES][CHUNK];
    float scale[2];  // of the tokens that this lane finishes

    __device__ ColumnKeys(Shared& shared, const Queries& queries, const Store& store, int g, int m0, int end)
        : shared(shared), store(store), x(queries.x + ((i64)g * queries.rows + m0) * KEY_DIM), rows(queries.rows - m0),
          end(end), g(g), block(threadIdx.x / 64), pair(threadIdx.x / 32 % 2), quad(threadIdx.x % 8),
          strip(threadIdx.x % 32 / 8)
    {
        if (!PREPARES) lift_queries(0, block, 0, THREADS);
        __syncthreads();
    }

    // Queries for the codes of one block, whose channels' scales begin at `at`, by `threads` threads; their constant part
    // is that of tokens `slice`.
    __device__ void lift_queries(int place, int slice, i64 at, int threads)
    {
        float constant[ROWS] = {};
        for (int c = threadIdx.x % threads; c < KEY_DIM; c += threads) {
            float step = 1, low = -(float)(1 << (BITS - 1));
            if (PREPARES) {
                step = half_to_float(((const u16*)store.b)[at + c]);
                low = half_to_float(((const u16*)store.c)[at + c]);
            }
            float lift = step * LIFT / (1 << c / BYTES * BITS);
#pragma unroll
            for (int m = 0; m < ROWS; ++m) {
                float q = m < rows ? x[(i64)m * KEY_DIM + c] : 0;
                shared.q[place][m][c] = q * lift;
                constant[m] += q * low;
            }
        }
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            constant[m] = lane_sum(constant[m]);
            if (threadIdx.x % 32 == 0) shared.constant[slice][pair][m] = constant[m];
        }
    }

    // Byte `row` of four tokens from `token` on.
    __device__ u32 four_tokens(int token, int row) const
    {
        const u8* from = (const u8*)store.a + ((i64)g * store.capacity + token) * BYTES + row;
        u32 word = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (token + i < end) word |= (u32)from[i * BYTES] << 8 * i;
        return BITS == 8 && KEY_SCALES == SCALE_PER_TOKEN ? word ^ 0x80808080u : word;
    }

    __device__ int row(int turn) const { return (2 * turn + pair) * 4 + strip; }

    __device__ void load(int u, int tile, int chunk = 0)
    {
        int token = tile * TILE + block * 32 + 4 * quad;
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            int r = row(chunk * CHUNK + i);
            raw[u][i] = token < end && r < BYTES ? four_tokens(token, r) : 0;
        }
        if (PREPARES || chunk > 0 || u != MY_TILE) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int t = tile * TILE + threadIdx.x % 32 + 32 * i;
            scale[i] = t < end ? half_to_float(((const u16*)store.b)[(i64)g * store.capacity + t]) : 0;
        }
    }

    __device__ void prepare(int tile)
    {
        int groups = store.capacity / KEY_BLOCK;
        for (int u = 0; u < TILES; ++u) {
            int group = least(((tile + u) * TILE + 32 * block) / KEY_BLOCK, groups - 1);
            lift_queries(2 * u + block, 2 * u + block, ((i64)g * groups + group) * KEY_DIM, THREADS / 2);
        }
    }

    __device__ void scores(int u, int tile)
    {
        float sum[ROWS][4] = {};
        for (int chunk = 0; chunk < divide_up(TURNS, CHUNK); ++chunk) {
            if (chunk > 0) load(u, tile, chunk);
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) {
                int r = least(row(chunk * CHUNK + i), BYTES - 1);  // beyond the end raw is 0
#pragma unroll
                for (int part = 0; part < PARTS; ++part)
#pragma unroll
                    for (int m = 0; m < ROWS; ++m) {
                        float q = shared.q[PREPARES ? 2 * u + block : 0][m][r + part * BYTES];
#pragma unroll
                        for (int t = 0; t < 4; ++t) {
                            u32 word = raw[u][i] >> t / 2 * 16 & ((1u << BITS) - 1) << (t % 2 * 8 + part * BITS);
                            sum[m][t] = multiply_add(q, __uint_as_float(word), sum[m][t]);
                        }
                    }
            }
        }
#pragma unroll
        for (int m = 0; m < ROWS; ++m)
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                float x = sum[m][t] * (SINK / (1 << t % 2 * 8));
                x += __shfl_xor_sync(EVERY_LANE, x, 8);
                x += __shfl_xor_sync(EVERY_LANE, x, 16);
                if (strip == 0) shared.s[pair][u][m][block * 32 + 4 * quad + t] = x;
            }
    }

    __device__ float score(int u, int m, int i) const
    {
        int slice = PREPARES ? 2 * u + i / 32 : 0;
        float sum = shared.s[0][u][m][i] + shared.s[1][u][m][i];
        sum += shared.constant[slice][0][m] + shared.constant[slice][1][m];
        if (PREPARES) return sum;
        return (sum + shared.constant[1][0][m] + shared.constant[1][1][m]) * scale[i / 32];  // of all four warps
    }
};
