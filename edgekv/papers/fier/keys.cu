// Keys as one bit per element and two levels per channel and GROUP of tokens. Store: signs (G, words,
// KEY_DIM), a word of 32 tokens per channel, and levels (G, groups, 2, KEY_DIM), centre and step.

struct FierKeys {
    static constexpr bool PREPARES = true;
    static constexpr int MINE = divide_up(KEY_DIM, 8) * 4;  // channels of a warp; two warps share 32 tokens
    struct Shared {
        alignas(16) float q[2 * TILES][ROWS][2 * MINE];  // [32 tokens]; 0 beyond KEY_DIM
        alignas(16) u32 words[2 * TILES][2 * MINE];
        float constant[2 * TILES][2][ROWS], s[2][TILES][ROWS][TILE];  // [warp of the pair]
    };
    Shared& shared;
    const u32* signs;
    const u16* levels;
    const float* x;
    int rows, groups, end, half, pair;

    __device__ FierKeys(Shared& shared, const Queries& queries, const Store& store, int g, int m0, int end)
        : shared(shared), signs((const u32*)store.a + (i64)g * (store.capacity / 32) * KEY_DIM),
          levels((const u16*)store.b + (i64)g * (store.capacity / GROUP) * 2 * KEY_DIM),
          x(queries.x + ((i64)g * queries.rows + m0) * KEY_DIM), rows(queries.rows - m0), groups(store.capacity / GROUP),
          end(end), half(threadIdx.x / 64), pair(threadIdx.x / 32 % 2)
    {
    }

    __device__ void load(int u, int tile) {}

    __device__ void prepare(int tile)
    {
        for (int u = 0; u < TILES; ++u) {
            int first = (tile + u) * TILE + 32 * half, slice = 2 * u + half;
            const u16* own = levels + (i64)least(first / GROUP, groups - 1) * 2 * KEY_DIM;
            float constant[ROWS] = {};
            for (int c = threadIdx.x % 64; c < 2 * MINE; c += 64) {
                bool there = c < KEY_DIM;
                float centre = there ? half_to_float(own[c]) : 0, step = there ? half_to_float(own[KEY_DIM + c]) : 0;
                shared.words[slice][c] = there && first < end ? signs[(i64)(first / 32) * KEY_DIM + c] : 0;
#pragma unroll
                for (int m = 0; m < ROWS; ++m) {
                    float q = there && m < rows ? x[(i64)m * KEY_DIM + c] : 0;
                    shared.q[slice][m][c] = q * step;
                    constant[m] += q * centre;
                }
            }
#pragma unroll
            for (int m = 0; m < ROWS; ++m) {
                constant[m] = lane_sum(constant[m]);
                if (threadIdx.x % 32 == 0) shared.constant[slice][pair][m] = constant[m];
            }
        }
    }

    // A lane is a token; a channel whose bit is 0 counts minus its step.
    __device__ void scores(int u, int tile)
    {
        int slice = 2 * u + half, shift = 31 - threadIdx.x % 32;
        float sum[ROWS] = {};
#pragma unroll 4
        for (int i = 0; i < MINE; i += 4) {
            u32 words[4], q[4];
            load_words<4>(&shared.words[slice][pair * MINE + i], words);
#pragma unroll
            for (int m = 0; m < ROWS; ++m) {
                load_words<4>(&shared.q[slice][m][pair * MINE + i], q);
#pragma unroll
                for (int k = 0; k < 4; ++k) sum[m] += __uint_as_float(q[k] ^ (~words[k] << shift & 0x80000000u));
            }
        }
#pragma unroll
        for (int m = 0; m < ROWS; ++m) shared.s[pair][u][m][32 * half + threadIdx.x % 32] = sum[m];
    }

    __device__ float score(int u, int m, int i) const
    {
        int slice = 2 * u + i / 32;
        float constant = shared.constant[slice][0][m] + shared.constant[slice][1][m];
        return shared.s[0][u][m][i] + shared.s[1][u][m][i] + constant;
    }
};
