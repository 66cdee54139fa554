// Keys as signs around centres, with queries in PLANES bit planes. KEY_DIM is a multiple of 64; store:
// signs, scale, centres, centre_step. A block of 64 tokens has a centre in row 0 and, around it, one per 16 in rows 1 to 4.

struct CentredKeys {
    static constexpr bool PREPARES = false;
    static constexpr int WORDS = KEY_DIM / 64;
    static constexpr int MINE = divide_up(WORDS, 2);  // two threads share a token
    static constexpr int CENTRES = 1 + WARPS;
    static constexpr int BYTES = KEY_DIM / 2;         // of a centre: byte j has channels j and j + BYTES
    static constexpr int LANE_BYTES = BYTES / 32;     // that a lane takes, side by side
    static constexpr int PAIRS = divide_up(LANE_BYTES, 2);

    struct Shared {
        float centre[TILES][ROWS][WARPS], s[TILES][ROWS][TILE];
        u64 planes[ROWS][PLANES][WORDS];
    };
    Shared& shared;
    const u64* signs;
    const u16 *scale, *centre_step;
    const u8* centres;
    int end, token, half;
    u64 raw[TILES][MINE];
    u32 common[TILES][PAIRS], own[TILES][PAIRS];  // codes of the centres of all 64 tokens and of this warp's 16
    float width[TILES], common_step[TILES], own_step[TILES], query_step[ROWS];
    float q[ROWS][PAIRS][4], middle[ROWS];        // queries times LIFT for the codes of this lane, and what code 0 gives

    __device__ CentredKeys(Shared& shared, const Queries& queries, const Store& store, int g, int m0, int end)
        : shared(shared), signs((const u64*)store.a + (i64)g * (store.capacity / TILE) * WORDS * TILE),
          scale((const u16*)store.b + (i64)g * store.capacity),
          centre_step((const u16*)store.d + (i64)g * (store.capacity / TILE) * CENTRES),
          centres((const u8*)store.c + (i64)g * (store.capacity / TILE) * CENTRES * BYTES), end(end),
          token(threadIdx.x / 2), half(threadIdx.x % 2)
    {
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            i64 row = (i64)g * queries.rows + m0 + m;
            bool there = m0 + m < queries.rows;
            query_step[m] = there ? queries.scale[row] : 0;
            middle[m] = 0;
#pragma unroll
            for (int i = 0; i < 4 * PAIRS; ++i) {
                int byte = i / 2, c = (int)threadIdx.x % 32 * LANE_BYTES + byte + i % 2 * BYTES;
                float x = there && byte < LANE_BYTES ? queries.x[row * KEY_DIM + c] : 0;
                q[m][i / 4][i % 4] = x * (LIFT / (1 << i % 4 * 4));
                middle[m] -= 7.5f * x;
            }
            for (int i = threadIdx.x; i < PLANES * WORDS; i += THREADS)
                shared.planes[m][i / WORDS][i % WORDS] = there ? ((const u64*)queries.codes)[row * PLANES * WORDS + i] : 0;
        }
        __syncthreads();
    }

    // The codes of row `row` that this lane takes, two bytes to a word.
    __device__ void load_codes(i64 row, u32* codes)
    {
        const u8* from = centres + row * BYTES + threadIdx.x % 32 * LANE_BYTES;
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            if (LANE_BYTES % 2 == 0)
                codes[i] = ((const u16*)from)[i];
            else
                codes[i] = from[2 * i] | (2 * i + 1 < LANE_BYTES ? from[2 * i + 1] << 8 : 0);
        }
    }

    __device__ void load(int u, int tile)
    {
        int first = tile * TILE;
        bool there = first + token < end;
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
            int word = 2 * i + half;
            raw[u][i] = there && word < WORDS ? signs[((i64)tile * WORDS + word) * TILE + token] : 0;
        }
        width[u] = there ? half_to_float(scale[first + token]) : 0;
        if (first >= end) return;
        i64 row = (i64)tile * CENTRES, mine = row + 1 + threadIdx.x / 32;
        common_step[u] = half_to_float(centre_step[row]), own_step[u] = half_to_float(centre_step[mine]);
        load_codes(row, common[u]);
        load_codes(mine, own[u]);
    }

    __device__ void prepare(int tile) {}

    // This lane's part of a query's product with the levels code - 7.5.
    __device__ float product(int m, const u32* codes) const
    {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 4 * PAIRS; ++i)
            sum = multiply_add(q[m][i / 4][i % 4], __uint_as_float(codes[i / 4] & 15u << i % 4 * 4), sum);
        return sum * SINK + middle[m];
    }

    __device__ void scores(int u, int tile)
    {
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            float sum = lane_sum(common_step[u] * product(m, common[u]) + own_step[u] * product(m, own[u]));
            if (threadIdx.x % 32 == 0) shared.centre[u][m][threadIdx.x / 32] = sum;
            int differing = 0;
#pragma unroll
            for (int j = 0; j < PLANES; ++j) {
                differing *= 2;
#pragma unroll
                for (int i = 0; i < MINE; ++i)
                    if (2 * i + half < WORDS) differing += __popcll(raw[u][i] ^ shared.planes[m][j][2 * i + half]);
            }
            differing += __shfl_xor_sync(EVERY_LANE, differing, 1);
            float product = 0.5f * (float)(((1 << PLANES) - 1) * KEY_DIM - 2 * differing);
            if (half == 0) shared.s[u][m][token] = query_step[m] * width[u] * product;
        }
    }

    __device__ float score(int u, int m, int i) const { return shared.s[u][m][i] + shared.centre[u][m][i / 16]; }
};
