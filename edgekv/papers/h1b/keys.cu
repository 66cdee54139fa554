// Scores of keys of KEY_DIM sign bits with queries of as many.

struct SignKeys {
    static constexpr int WORDS = KEY_DIM / 64;
    static constexpr int WORDS_OF_THREAD = divide_up(WORDS, 2);  // two threads share a token
    struct Shared {
        float s[TILES][ROWS][TILE];
    };
    Shared& shared;
    const u64* signs;
    int end, token, half;
    u64 raw[TILES][WORDS_OF_THREAD], q[ROWS][WORDS_OF_THREAD];
    float scale[ROWS];

    __device__ SignKeys(Shared& shared, const Queries& queries, const Store& store, int g, int m0, int end)
        : shared(shared), signs((const u64*)store.a + (i64)g * divide_up(store.capacity, TILE) * WORDS * TILE), end(end),
          token(threadIdx.x / 2), half(threadIdx.x % 2)
    {
UNROLL for (int m = 0; m < ROWS; ++m) {
            i64 row = (i64)g * queries.rows + m0 + m;
            bool exists = m0 + m < queries.rows;
            scale[m] = exists ? queries.scale[row] : 0;
            for (int i = 0; i < WORDS_OF_THREAD; ++i)
                q[m][i] = exists && 2 * i + half < WORDS ? ((const u64*)queries.codes)[row * WORDS + 2 * i + half] : 0;
        }
    }

    __device__ void load(int u, int tile)
    {
UNROLL for (int i = 0; i < WORDS_OF_THREAD; ++i) {
            int word = 2 * i + half;
            bool exists = tile * TILE + token < end && word < WORDS;
            raw[u][i] = exists ? signs[((i64)tile * WORDS + word) * TILE + token] : 0;
        }
    }

    __device__ void scores(int u, int tile)
    {
UNROLL for (int m = 0; m < ROWS; ++m) {
            int differing = 0;
UNROLL for (int i = 0; i < WORDS_OF_THREAD; ++i) differing += __popcll(raw[u][i] ^ q[m][i]);
            differing += __shfl_xor_sync(ALL_LANES, differing, 1);
            if (half == 0) shared.s[u][m][token] = scale[m] * (float)(KEY_DIM - 2 * differing);
        }
    }

    __device__ float score(int u, int m, int i) const { return shared.s[u][m][i]; }
};
