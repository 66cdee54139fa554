// Keys and values as rows of float16 or float32 numbers.

template <class E> __device__ __forceinline__ float widen(const u32* words, int i);
template <> __device__ __forceinline__ float widen<u16>(const u32* words, int i)
{
    return half_to_float((u16)(words[i / 2] >> i % 2 * 16));
}
template <> __device__ __forceinline__ float widen<float>(const u32* words, int i) { return __uint_as_float(words[i]); }

// How a block reads rows of HEAD_DIM elements: LANES threads side by side take one token, VEC elements each (and PIECES
// times that), AT_ONCE tokens at a time. A thread has at most FLIGHT words on their way, of each of the first HELD tiles.
template <class E, int FLIGHT, int HELD> struct Rows {
    static constexpr int VEC = common_divisor(HEAD_DIM, 16 / sizeof(E));
    static constexpr int WORDS = most(1, VEC * sizeof(E) / 4);
    static constexpr int LANES = least(32, power_above(divide_up(HEAD_DIM, VEC)));
    static constexpr int PIECES = divide_up(HEAD_DIM, VEC * LANES);
    static constexpr int WIDTH = PIECES * VEC;
    static constexpr int AT_ONCE = least(TILE, THREADS / LANES);
    static constexpr int TURNS = TILE / AT_ONCE;
    static constexpr int CHUNK = least(TURNS, power_below(most(1, FLIGHT / (PIECES * WORDS))));  // turns whose loads are in flight

    const E* rows;
    int end, lane, slot;
    u32 raw[HELD][CHUNK][PIECES][WORDS];

    __device__ Rows(const Store& store, int g, int end)
        : rows((const E*)store.a + (i64)g * store.capacity * HEAD_DIM), end(end), lane(threadIdx.x % LANES),
          slot(threadIdx.x / LANES)
    {
    }

    __device__ int channel(int piece) const { return (piece * LANES + lane) * VEC; }

    __device__ void load(int u, int tile, int chunk = 0)
    {
        if (u >= HELD) return;
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            int token = tile * TILE + (chunk * CHUNK + i) * AT_ONCE + slot;
#pragma unroll
            for (int k = 0; k < PIECES; ++k) {
                bool there = token < end && slot < AT_ONCE && channel(k) < HEAD_DIM;
                const E* from = rows + (i64)token * HEAD_DIM + channel(k);
                if (!there)
                    for (int w = 0; w < WORDS; ++w) raw[u][i][k][w] = 0;
                else if (VEC * sizeof(E) < 4)
                    raw[u][i][k][0] = *(const u16*)from;
                else
                    load_words<WORDS>(from, raw[u][i][k]);
            }
        }
    }
};

template <class E, int FLIGHT = 32, int HELD = TILES> struct RowKeys : Rows<E, FLIGHT, HELD> {
    typedef Rows<E, FLIGHT, HELD> R;
    static constexpr bool PREPARES = false;
    struct Shared {
        float s[TILES][ROWS][TILE];
    };
    Shared& shared;
    float q[ROWS][R::WIDTH];

    __device__ RowKeys(Shared& shared, const Queries& queries, const Store& store, int g, int m0, int end)
        : R(store, g, end), shared(shared)
    {
#pragma unroll
        for (int m = 0; m < ROWS; ++m)
            for (int k = 0; k < R::PIECES; ++k)
                for (int j = 0; j < R::VEC; ++j) {
                    int c = this->channel(k) + j;
                    bool there = m0 + m < queries.rows && c < HEAD_DIM;
                    i64 at = ((i64)g * queries.rows + m0 + m) * HEAD_DIM + c;
                    q[m][k * R::VEC + j] = there ? queries.x[at] : 0;
                }
    }

    __device__ void prepare(int tile) {}

    __device__ void scores(int u, int tile)
    {
        if (u >= HELD) return;
        for (int chunk = 0; chunk < R::TURNS / R::CHUNK; ++chunk) {
            if (chunk > 0) this->load(u, tile, chunk);
            float sum[R::CHUNK * ROWS];
#pragma unroll
            for (int i = 0; i < R::CHUNK; ++i) {
#pragma unroll
                for (int m = 0; m < ROWS; ++m) sum[i * ROWS + m] = 0;
#pragma unroll
                for (int k = 0; k < R::PIECES; ++k)
#pragma unroll
                    for (int j = 0; j < R::VEC; ++j) {
                        float x = widen<E>(this->raw[u][i][k], j);
#pragma unroll
                        for (int m = 0; m < ROWS; ++m) sum[i * ROWS + m] += q[m][k * R::VEC + j] * x;
                    }
            }
            typedef SpreadSum<R::CHUNK * ROWS, 1, R::LANES> Sums;
            int first = 0;
            bool mine = this->slot < R::AT_ONCE;
            Sums::run(sum, first, mine);
#pragma unroll
            for (int i = 0; i < Sums::kept(); ++i) {
                int token = (chunk * R::CHUNK + (first + i) / ROWS) * R::AT_ONCE + this->slot;
                if (mine) shared.s[u][(first + i) % ROWS][token] = sum[i];
            }
        }
    }

    __device__ float score(int u, int m, int i) const { return shared.s[u][m][i]; }
};

template <class E, int FLIGHT = 32, int HELD = TILES> struct RowValues : Rows<E, FLIGHT, HELD> {
    typedef Rows<E, FLIGHT, HELD> R;
    struct Shared {
        float p[TILES][ROWS][TILE];
    };
    Shared& shared;
    float sum[ROWS * R::WIDTH];

    __device__ RowValues(Shared& shared, const Store& store, int g, int end) : R(store, g, end), shared(shared)
    {
        for (int i = 0; i < ROWS * R::WIDTH; ++i) sum[i] = 0;
    }

    __device__ void weigh(int u, int m, int turn, float p0, float p1)
    {
        shared.p[u][m][threadIdx.x % 32] = p0;
        shared.p[u][m][threadIdx.x % 32 + 32] = p1;
    }

    __device__ void rescale(int m, float factor)
    {
#pragma unroll
        for (int j = 0; j < R::WIDTH; ++j) sum[m * R::WIDTH + j] *= factor;
    }

    __device__ void rescale_offset(int turn, float factor) {}

    __device__ void add(int u, int tile)
    {
        if (u >= HELD) return;
        for (int chunk = 0; chunk < R::TURNS / R::CHUNK; ++chunk) {
            if (chunk > 0) this->load(u, tile, chunk);
#pragma unroll
            for (int i = 0; i < R::CHUNK; ++i) {
                int token = (chunk * R::CHUNK + i) * R::AT_ONCE + this->slot;
                if (this->slot >= R::AT_ONCE) continue;
                float p[ROWS];
#pragma unroll
                for (int m = 0; m < ROWS; ++m) p[m] = shared.p[u][m][token];
#pragma unroll
                for (int k = 0; k < R::PIECES; ++k)
#pragma unroll
                    for (int j = 0; j < R::VEC; ++j) {
                        float x = widen<E>(this->raw[u][i][k], j);
#pragma unroll
                        for (int m = 0; m < ROWS; ++m) sum[m * R::WIDTH + k * R::VEC + j] += p[m] * x;
                    }
            }
        }
    }

    // Adds the sums of all threads to out.
    __device__ void finish(float (*out)[HEAD_DIM])
    {
        typedef SpreadSum<ROWS * R::WIDTH, R::LANES, 32> Sums;
        int first = 0;
        bool mine = true;
        Sums::run(sum, first, mine);
        for (int warp = 0; warp < WARPS; ++warp) {
            bool turn = mine && (int)threadIdx.x / 32 == warp;
#pragma unroll
            for (int i = 0; i < Sums::kept(); ++i) {
                int m = (first + i) / R::WIDTH, j = (first + i) % R::WIDTH, c = this->channel(j / R::VEC) + j % R::VEC;
                if (turn && c < HEAD_DIM) out[m][c] += sum[i];
            }
            __syncthreads();
        }
    }
};
