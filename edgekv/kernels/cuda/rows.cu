// Keys and values as rows of tokens. How a codec C stores a token of WIDTH numbers, of which a thread takes VEC at a time, one
// of UNITS units:
//   channel(unit, j)                 which of the token's numbers the unit's j-th is
//   load(token, unit, words)         starts the reads, into WORDS words
//   decode(words, token, unit, x)    the VEC numbers, from what was read
struct Row {
    struct Shared {};
    static constexpr bool STAGES = false;  // whether stage(tile) puts a tile into shared memory before its tokens are loaded
    __device__ void stage(int tile) {}
    __device__ void weigh(int tile, float& p0, float& p1) const {}  // what becomes of the weights of a lane's tokens of a tile
};

// Numbers as they are, float16 (u16) or float32.
template <class E> struct Numbers : Row {
    static constexpr int WIDTH = HEAD_DIM, VEC = common_divisor(WIDTH, 16 / sizeof(E)), UNITS = WIDTH / VEC;
    static constexpr int WORDS = most(1, VEC * sizeof(E) / 4);
    const E* rows;

    __device__ Numbers(Shared&, const Store& store, int g, int end) : rows((const E*)store.a + (i64)g * store.capacity * WIDTH) {}

    static __device__ int channel(int unit, int j) { return unit * VEC + j; }

    __device__ void load(int token, int unit, u32* words) const
    {
        const E* from = rows + (i64)token * WIDTH + unit * VEC;
        if (VEC * sizeof(E) < 4)
            words[0] = *(const u16*)from;
        else
            load_words<WORDS>(from, words);
    }

    __device__ void decode(const u32* words, int token, int unit, float* x) const
    {
        UNROLL for (int j = 0; j < VEC; ++j)
            x[j] = sizeof(E) == 4 ? __uint_as_float(words[j % WORDS]) : half_to_float((u16)(words[j / 2 % WORDS] >> j % 2 * 16));
    }
};

// Integers of BITS bits, read as code * scale + offset. Byte j of a token's BYTES holds the numbers j, j + BYTES, ... from its
// low bits up. Of a token store.b has the scale (u16), and store.c, as SCALES says:
#define FROM_MIDDLE 0  // nothing: codes of 8 bits are signed, of others the offset is minus the scale times the middle one
#define FROM_ZERO 1    // the code that stands for 0 (u8)
#define FROM_LOW 2     // the offset (u16)
template <int BITS, int SCALES> struct Integers : Row {
    static constexpr int WIDTH = HEAD_DIM, PARTS = 8 / BITS, BYTES = WIDTH / PARTS;
    static constexpr int SOME = common_divisor(BYTES, most(1, least(16, 64 / ROWS) / PARTS));
    static constexpr int VEC = SOME * PARTS, UNITS = BYTES / SOME, CODES = divide_up(SOME, 4), WORDS = CODES + 1;
    const u8* codes;
    const u16* scales;
    const void* offsets;

    __device__ Integers(Shared&, const Store& store, int g, int end)
        : codes((const u8*)store.a + (i64)g * store.capacity * BYTES), scales((const u16*)store.b + (i64)g * store.capacity),
          offsets((const u8*)store.c + (i64)g * store.capacity * (SCALES == FROM_LOW ? 2 : 1))
    {
    }

    static __device__ int channel(int unit, int j) { return unit * SOME + j % SOME + j / SOME * BYTES; }

    __device__ void load_codes(int token, int unit, u32* words) const
    {
        const u8* from = codes + (i64)token * BYTES + unit * SOME;
        if (SOME >= 4)
            load_words<CODES>(from, words);
        else
            words[0] = SOME == 2 ? *(const u16*)from : *from;
    }

    static __device__ __forceinline__ float code(const u32* words, int j)
    {
        u32 bits = words[j % SOME / 4] >> (j % SOME % 4 * 8 + j / SOME * BITS) & ((1u << BITS) - 1);
        if (BITS == 8 && SCALES == FROM_MIDDLE) bits ^= 128;
        return __uint_as_float(0x4b000000u | bits) - 8388608.0f;  // 2 ** 23
    }

    __device__ void load(int token, int unit, u32* words) const
    {
        load_codes(token, unit, words);
        words[CODES] = scales[token];
        if (SCALES == FROM_ZERO) words[CODES] |= (u32)((const u8*)offsets)[token] << 16;
        if (SCALES == FROM_LOW) words[CODES] |= (u32)((const u16*)offsets)[token] << 16;
    }

    __device__ void decode(const u32* words, int token, int unit, float* x) const
    {
        float scale = half_to_float((u16)words[CODES]), offset = -scale * (1 << (BITS - 1));
        if (SCALES == FROM_ZERO) offset = -scale * (float)(words[CODES] >> 16);
        if (SCALES == FROM_LOW) offset = half_to_float((u16)(words[CODES] >> 16));
        UNROLL for (int j = 0; j < VEC; ++j) x[j] = code(words, j) * scale + offset;
    }
};

// How a block reads rows: LANES threads side by side take one token, PIECES units each, AT_ONCE tokens at a time. A thread has
// at most FLIGHT words on their way, of each of the first HELD tiles.
template <class C, int FLIGHT, int HELD> struct Rows : C {
    static constexpr int LANES = least(32, power_above(C::UNITS));
    static constexpr int PIECES = divide_up(C::UNITS, LANES);
    static constexpr int WIDTH = PIECES * C::VEC;
    static constexpr int AT_ONCE = least(TILE, THREADS / LANES);
    static constexpr int TURNS = TILE / AT_ONCE;
    static constexpr int CHUNK = least(TURNS, power_below(most(1, FLIGHT / (PIECES * C::WORDS))));  // turns whose loads are in flight

    int end, lane, slot;
    u32 raw[HELD][CHUNK][PIECES][C::WORDS];

    __device__ Rows(typename C::Shared& shared, const Store& store, int g, int end)
        : C(shared, store, g, end), end(end), lane(threadIdx.x % LANES), slot(threadIdx.x / LANES)
    {
    }

    __device__ int unit(int piece) const { return piece * LANES + lane; }

    __device__ void load(int u, int tile, int chunk = 0)
    {
        if (u < HELD && !C::STAGES) read(u, tile, chunk);
    }

    __device__ void read(int u, int tile, int chunk)
    {
        UNROLL for (int i = 0; i < CHUNK; ++i) {
            int token = tile * TILE + (chunk * CHUNK + i) * AT_ONCE + slot;
            UNROLL for (int k = 0; k < PIECES; ++k) {
                if (token < end && slot < AT_ONCE && unit(k) < C::UNITS)
                    C::load(token, unit(k), raw[u][i][k]);
                else
                    for (int w = 0; w < C::WORDS; ++w) raw[u][i][k][w] = 0;
            }
        }
    }

    // What turns chunk * CHUNK .. of a tile need, unless it is on its way.
    __device__ void fetch(int u, int tile, int chunk)
    {
        if (C::STAGES && chunk == 0) {
            __syncthreads();
            C::stage(tile);
            __syncthreads();
        }
        if (C::STAGES || chunk > 0) read(u, tile, chunk);
    }

    __device__ int token(int chunk, int i) const { return (chunk * CHUNK + i) * AT_ONCE + slot; }
};

template <class C, int FLIGHT = 32, int HELD = TILES> struct RowKeys : Rows<C, FLIGHT, HELD> {
    typedef Rows<C, FLIGHT, HELD> R;
    struct Shared : C::Shared {
        float s[TILES][ROWS][TILE];
    };
    Shared& shared;
    float q[ROWS][R::WIDTH];

    __device__ RowKeys(Shared& shared, const Queries& queries, const Store& store, int g, int m0, int end)
        : R(shared, store, g, end), shared(shared)
    {
        UNROLL for (int m = 0; m < ROWS; ++m)
            for (int k = 0; k < R::PIECES; ++k)
                for (int j = 0; j < C::VEC; ++j) {
                    bool there = m0 + m < queries.rows && this->unit(k) < C::UNITS;
                    i64 at = ((i64)g * queries.rows + m0 + m) * C::WIDTH + C::channel(this->unit(k), j);
                    q[m][k * C::VEC + j] = there ? queries.x[at] : 0;
                }
    }

    __device__ void scores(int u, int tile)
    {
        if (u >= HELD) return;
        for (int chunk = 0; chunk < R::TURNS / R::CHUNK; ++chunk) {
            this->fetch(u, tile, chunk);
            float sum[R::CHUNK * ROWS];
            UNROLL for (int i = 0; i < R::CHUNK; ++i) {
                UNROLL for (int m = 0; m < ROWS; ++m) sum[i * ROWS + m] = 0;
                UNROLL for (int k = 0; k < R::PIECES; ++k) {
                    float x[C::VEC];
                    C::decode(this->raw[u][i][k], tile * TILE + this->token(chunk, i), this->unit(k), x);
                    UNROLL for (int j = 0; j < C::VEC; ++j)
                        UNROLL for (int m = 0; m < ROWS; ++m) sum[i * ROWS + m] += q[m][k * C::VEC + j] * x[j];
                }
            }
            typedef SpreadSum<R::CHUNK * ROWS, 1, R::LANES> Sums;
            int first = 0;
            bool mine = this->slot < R::AT_ONCE;
            Sums::run(sum, first, mine);
            UNROLL for (int i = 0; i < Sums::kept(); ++i)
                if (mine) shared.s[u][(first + i) % ROWS][this->token(chunk, (first + i) / ROWS)] = sum[i];
        }
    }

    __device__ float score(int u, int m, int i) const { return shared.s[u][m][i]; }
};

template <class C, int FLIGHT = 32, int HELD = TILES> struct RowValues : Rows<C, FLIGHT, HELD> {
    typedef Rows<C, FLIGHT, HELD> R;
    struct Shared : C::Shared {
        float p[TILES][ROWS][TILE];
    };
    Shared& shared;
    float sum[ROWS * R::WIDTH];

    __device__ RowValues(Shared& shared, const Store& store, int g, int end) : R(shared, store, g, end), shared(shared)
    {
        for (int i = 0; i < ROWS * R::WIDTH; ++i) sum[i] = 0;
    }

    __device__ void weigh(int u, int m, int tile, float p0, float p1)
    {
        C::weigh(tile, p0, p1);
        shared.p[u][m][threadIdx.x % 32] = p0;
        shared.p[u][m][threadIdx.x % 32 + 32] = p1;
    }

    __device__ void rescale(int m, float factor)
    {
        UNROLL for (int j = 0; j < R::WIDTH; ++j) sum[m * R::WIDTH + j] *= factor;
    }

    __device__ void add(int u, int tile)
    {
        if (u >= HELD) return;
        for (int chunk = 0; chunk < R::TURNS / R::CHUNK; ++chunk) {
            this->fetch(u, tile, chunk);
            UNROLL for (int i = 0; i < R::CHUNK; ++i) {
                if (this->slot >= R::AT_ONCE) continue;
                float p[ROWS];
                UNROLL for (int m = 0; m < ROWS; ++m) p[m] = shared.p[u][m][this->token(chunk, i)];
                UNROLL for (int k = 0; k < R::PIECES; ++k) {
                    float x[C::VEC];
                    C::decode(this->raw[u][i][k], tile * TILE + this->token(chunk, i), this->unit(k), x);
                    UNROLL for (int j = 0; j < C::VEC; ++j)
                        UNROLL for (int m = 0; m < ROWS; ++m) sum[m * R::WIDTH + k * C::VEC + j] += p[m] * x[j];
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
            UNROLL for (int i = 0; i < Sums::kept(); ++i) {
                int m = (first + i) / R::WIDTH, j = (first + i) % R::WIDTH, unit = this->unit(j / C::VEC);
                if (turn && unit < C::UNITS) out[m][C::channel(unit, j % C::VEC)] += sum[i];
            }
            __syncthreads();
        }
    }
};
