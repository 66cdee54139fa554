// Keys and values read token by token. A row type C reads a codec's tokens of WIDTH numbers, of which a thread takes VEC at a
// time, one of UNITS units:
//   channel(unit, j)                 returns the channel of the unit's number j
//   load(token, unit, words)         starts the reads into WORDS words
//   decode(words, token, unit, x)    sets x to the VEC numbers
struct Row {
    struct Shared {};
    static constexpr bool STAGES = false;  // whether stage(tile) decodes a tile to shared memory before its tokens are loaded
    __device__ void stage(int tile) {}
    __device__ void scale_weights(int tile, float& p0, float& p1) const {}  // changes the weights of a lane's tokens of a tile
};

// Rows whose units are up to four neighbouring channels.
template <int CHANNELS> struct ChannelRow : Row {
    static constexpr int WIDTH = CHANNELS, VEC = common_divisor(WIDTH, 4), UNITS = WIDTH / VEC;
    static __device__ int channel(int unit, int j) { return unit * VEC + j; }
};

// Rows of float16 (u16) or float32.
template <class E> struct Numbers : Row {
    static constexpr int WIDTH = HEAD_DIM, VEC = common_divisor(WIDTH, 16 / sizeof(E)), UNITS = WIDTH / VEC;
    static constexpr int WORDS = max_of(1, VEC * sizeof(E) / 4);
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

// Rows of integers of BITS bits, read as code * scale + offset. Byte j of a token's BYTES holds the numbers j, j + BYTES, ... from
// its low bits up. store.b has each token's scale (u16); SCALES says what store.c has:
#define FROM_MIDDLE 0  // nothing: codes of 8 bits are signed, others have the middle code as zero
#define FROM_ZERO 1    // each token's code of zero (u8)
#define FROM_LOW 2     // each token's offset (u16)
template <int BITS, int SCALES> struct Integers : Row {
    static constexpr int WIDTH = HEAD_DIM, PER_BYTE = 8 / BITS, BYTES = WIDTH / PER_BYTE;
    static constexpr int UNIT_BYTES = common_divisor(BYTES, max_of(1, min_of(16, 64 / ROWS) / PER_BYTE));
    static constexpr int VEC = UNIT_BYTES * PER_BYTE, UNITS = BYTES / UNIT_BYTES, CODE_WORDS = divide_up(UNIT_BYTES, 4), WORDS = CODE_WORDS + 1;
    const u8* codes;
    const u16* scales;
    const void* offsets;

    __device__ Integers(Shared&, const Store& store, int g, int end)
        : codes((const u8*)store.a + (i64)g * store.capacity * BYTES), scales((const u16*)store.b + (i64)g * store.capacity),
          offsets((const u8*)store.c + (i64)g * store.capacity * (SCALES == FROM_LOW ? 2 : 1))
    {
    }

    static __device__ int channel(int unit, int j) { return unit * UNIT_BYTES + j % UNIT_BYTES + j / UNIT_BYTES * BYTES; }

    __device__ void load_codes(int token, int unit, u32* words) const
    {
        const u8* from = codes + (i64)token * BYTES + unit * UNIT_BYTES;
        if (UNIT_BYTES >= 4)
            load_words<CODE_WORDS>(from, words);
        else
            words[0] = UNIT_BYTES == 2 ? *(const u16*)from : *from;
    }

    static __device__ __forceinline__ float code(const u32* words, int j)
    {
        u32 bits = words[j % UNIT_BYTES / 4] >> (j % UNIT_BYTES % 4 * 8 + j / UNIT_BYTES * BITS) & ((1u << BITS) - 1);
        if (BITS == 8 && SCALES == FROM_MIDDLE) bits ^= 128;
        return __uint_as_float(0x4b000000u | bits) - 8388608.0f;  // 2 ** 23
    }

    __device__ void load(int token, int unit, u32* words) const
    {
        load_codes(token, unit, words);
        words[CODE_WORDS] = scales[token];
        if (SCALES == FROM_ZERO) words[CODE_WORDS] |= (u32)((const u8*)offsets)[token] << 16;
        if (SCALES == FROM_LOW) words[CODE_WORDS] |= (u32)((const u16*)offsets)[token] << 16;
    }

    __device__ void decode(const u32* words, int token, int unit, float* x) const
    {
        float scale = half_to_float((u16)words[CODE_WORDS]), offset = -scale * (1 << (BITS - 1));
        if (SCALES == FROM_ZERO) offset = -scale * (float)(words[CODE_WORDS] >> 16);
        if (SCALES == FROM_LOW) offset = half_to_float((u16)(words[CODE_WORDS] >> 16));
        UNROLL for (int j = 0; j < VEC; ++j) x[j] = code(words, j) * scale + offset;
    }
};

// How a thread block reads rows: LANES neighbouring threads take one token, UNITS_OF_LANE units each, TOKENS_AT_ONCE tokens at a time.
// A thread has at most IN_FLIGHT words on their way, from each of the first TILES_READ tiles.
template <class C, int IN_FLIGHT, int TILES_READ> struct Rows : C {
    static constexpr int LANES = min_of(32, power_above(C::UNITS));
    static constexpr int UNITS_OF_LANE = divide_up(C::UNITS, LANES);
    static constexpr int WIDTH = UNITS_OF_LANE * C::VEC;
    static constexpr int TOKENS_AT_ONCE = min_of(TILE, THREADS / LANES);
    static constexpr int TURNS = TILE / TOKENS_AT_ONCE;
    static constexpr int CHUNK = min_of(TURNS, power_below(max_of(1, IN_FLIGHT / (UNITS_OF_LANE * C::WORDS))));  // turns whose loads are in flight

    int end, lane, slot;
    u32 raw[TILES_READ][CHUNK][UNITS_OF_LANE][C::WORDS];

    __device__ Rows(typename C::Shared& shared, const Store& store, int g, int end)
        : C(shared, store, g, end), end(end), lane(threadIdx.x % LANES), slot(threadIdx.x / LANES)
    {
    }

    __device__ int unit(int piece) const { return piece * LANES + lane; }

    __device__ void load(int u, int tile, int chunk = 0)
    {
        if (u < TILES_READ && !C::STAGES) read(u, tile, chunk);
    }

    __device__ void read(int u, int tile, int chunk)
    {
        UNROLL for (int i = 0; i < CHUNK; ++i) {
            int token = tile * TILE + (chunk * CHUNK + i) * TOKENS_AT_ONCE + slot;
            UNROLL for (int k = 0; k < UNITS_OF_LANE; ++k) {
                if (token < end && slot < TOKENS_AT_ONCE && unit(k) < C::UNITS)
                    C::load(token, unit(k), raw[u][i][k]);
                else
                    for (int w = 0; w < C::WORDS; ++w) raw[u][i][k][w] = 0;
            }
        }
    }

    // Reads what turns chunk * CHUNK .. of a tile need, unless it is on its way.
    __device__ void fetch(int u, int tile, int chunk)
    {
        if (C::STAGES && chunk == 0) {
            __syncthreads();
            C::stage(tile);
            __syncthreads();
        }
        if (C::STAGES || chunk > 0) read(u, tile, chunk);
    }

    __device__ int token(int chunk, int i) const { return (chunk * CHUNK + i) * TOKENS_AT_ONCE + slot; }
};

template <class C, int IN_FLIGHT = 32, int TILES_READ = TILES> struct RowKeys : Rows<C, IN_FLIGHT, TILES_READ> {
    typedef Rows<C, IN_FLIGHT, TILES_READ> R;
    struct Shared : C::Shared {
        float s[TILES][ROWS][TILE];
    };
    Shared& shared;
    float q[ROWS][R::WIDTH];

    __device__ RowKeys(Shared& shared, const Queries& queries, const Store& store, int g, int m0, int end)
        : R(shared, store, g, end), shared(shared)
    {
        UNROLL for (int m = 0; m < ROWS; ++m)
            for (int k = 0; k < R::UNITS_OF_LANE; ++k)
                for (int j = 0; j < C::VEC; ++j) {
                    bool exists = m0 + m < queries.rows && this->unit(k) < C::UNITS;
                    i64 at = ((i64)g * queries.rows + m0 + m) * C::WIDTH + C::channel(this->unit(k), j);
                    q[m][k * C::VEC + j] = exists ? queries.x[at] : 0;
                }
    }

    __device__ void scores(int u, int tile)
    {
        if (u >= TILES_READ) return;
        for (int chunk = 0; chunk < R::TURNS / R::CHUNK; ++chunk) {
            this->fetch(u, tile, chunk);
            float sum[R::CHUNK * ROWS];
            UNROLL for (int i = 0; i < R::CHUNK; ++i) {
                UNROLL for (int m = 0; m < ROWS; ++m) sum[i * ROWS + m] = 0;
                UNROLL for (int k = 0; k < R::UNITS_OF_LANE; ++k) {
                    float x[C::VEC];
                    C::decode(this->raw[u][i][k], tile * TILE + this->token(chunk, i), this->unit(k), x);
                    UNROLL for (int j = 0; j < C::VEC; ++j)
                        UNROLL for (int m = 0; m < ROWS; ++m) sum[i * ROWS + m] += q[m][k * C::VEC + j] * x[j];
                }
            }
            typedef SpreadSum<R::CHUNK * ROWS, 1, R::LANES> Sums;
            int first = 0;
            bool is_owner = this->slot < R::TOKENS_AT_ONCE;
            Sums::run(sum, first, is_owner);
            UNROLL for (int i = 0; i < Sums::n_left(); ++i)
                if (is_owner) shared.s[u][(first + i) % ROWS][this->token(chunk, (first + i) / ROWS)] = sum[i];
        }
    }

    __device__ float score(int u, int m, int i) const { return shared.s[u][m][i]; }
};

template <class C, int IN_FLIGHT = 32, int TILES_READ = TILES> struct RowValues : Rows<C, IN_FLIGHT, TILES_READ> {
    typedef Rows<C, IN_FLIGHT, TILES_READ> R;
    struct Shared : C::Shared {
        float p[TILES][ROWS][TILE];
    };
    Shared& shared;
    float sum[ROWS * R::WIDTH];

    __device__ RowValues(Shared& shared, const Store& store, int g, int end) : R(shared, store, g, end), shared(shared)
    {
        for (int i = 0; i < ROWS * R::WIDTH; ++i) sum[i] = 0;
    }

    __device__ void set_weights(int u, int m, int tile, float p0, float p1)
    {
        C::scale_weights(tile, p0, p1);
        shared.p[u][m][threadIdx.x % 32] = p0;
        shared.p[u][m][threadIdx.x % 32 + 32] = p1;
    }

    __device__ void rescale(int m, float factor)
    {
        UNROLL for (int j = 0; j < R::WIDTH; ++j) sum[m * R::WIDTH + j] *= factor;
    }

    __device__ void add(int u, int tile)
    {
        if (u >= TILES_READ) return;
        for (int chunk = 0; chunk < R::TURNS / R::CHUNK; ++chunk) {
            this->fetch(u, tile, chunk);
            UNROLL for (int i = 0; i < R::CHUNK; ++i) {
                if (this->slot >= R::TOKENS_AT_ONCE) continue;
                float p[ROWS];
                UNROLL for (int m = 0; m < ROWS; ++m) p[m] = shared.p[u][m][this->token(chunk, i)];
                UNROLL for (int k = 0; k < R::UNITS_OF_LANE; ++k) {
                    float x[C::VEC];
                    C::decode(this->raw[u][i][k], tile * TILE + this->token(chunk, i), this->unit(k), x);
                    UNROLL for (int j = 0; j < C::VEC; ++j)
                        UNROLL for (int m = 0; m < ROWS; ++m) sum[m * R::WIDTH + k * C::VEC + j] += p[m] * x[j];
                }
            }
        }
    }

    // Adds all threads' sums to out.
    __device__ void finish(float (*out)[HEAD_DIM])
    {
        typedef SpreadSum<ROWS * R::WIDTH, R::LANES, 32> Sums;
        int first = 0;
        bool is_owner = true;
        Sums::run(sum, first, is_owner);
        for (int warp = 0; warp < WARPS; ++warp) {
            bool turn = is_owner && (int)threadIdx.x / 32 == warp;
            UNROLL for (int i = 0; i < Sums::n_left(); ++i) {
                int m = (first + i) / R::WIDTH, j = (first + i) % R::WIDTH, unit = this->unit(j / C::VEC);
                if (turn && unit < C::UNITS) out[m][C::channel(unit, j % C::VEC)] += sum[i];
            }
            __syncthreads();
        }
    }
};
