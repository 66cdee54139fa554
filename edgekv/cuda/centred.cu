// Keys as signs around centres, with queries in PLANES bit planes: `scores_centred`. KEY_DIM is a multiple of 64; store:
// signs, scale, centres, centre_step. A block of 64 tokens has a centre in row 0 and, around it, one per 16 in rows 1 to 4.

struct CentredKeys {
    static constexpr int WORDS = KEY_DIM / 64;
    static constexpr int MINE = divide_up(WORDS, 2);  // two threads share a token
    static constexpr int CENTRES = 1 + WARPS;
    static constexpr int BYTES = KEY_DIM / 2;
    static constexpr int LANE_BYTES = divide_up(BYTES, 32);

    struct Shared {
        float q[ROWS][KEY_DIM], centre[ROWS][WARPS], s[ROWS][TILE];
        u64 planes[ROWS][PLANES][WORDS];
    };
    Shared& shared;
    const u64* signs;
    const u16 *scale, *centre_step;
    const u8* centres;
    int end, token, half;
    u64 raw[MINE];
    u8 common[LANE_BYTES], own[LANE_BYTES];  // of the centres of all 64 tokens and of this warp's 16
    float width, common_step, own_step, query_step[ROWS];

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
            for (int c = threadIdx.x; c < KEY_DIM; c += THREADS) shared.q[m][c] = there ? queries.x[row * KEY_DIM + c] : 0;
            for (int i = threadIdx.x; i < PLANES * WORDS; i += THREADS)
                shared.planes[m][i / WORDS][i % WORDS] = there ? ((const u64*)queries.codes)[row * PLANES * WORDS + i] : 0;
        }
        __syncthreads();
    }

    __device__ void load(int tile)
    {
        int first = tile * TILE;
        bool there = first + token < end;
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
            int word = 2 * i + half;
            raw[i] = there && word < WORDS ? signs[((i64)tile * WORDS + word) * TILE + token] : 0;
        }
        width = there ? half_to_float(scale[first + token]) : 0;
        i64 row = (i64)tile * CENTRES, mine = row + 1 + threadIdx.x / 32;
        common_step = half_to_float(centre_step[row]), own_step = half_to_float(centre_step[mine]);
#pragma unroll
        for (int i = 0; i < LANE_BYTES; ++i) {
            int j = least(threadIdx.x % 32 + 32 * i, BYTES - 1);
            common[i] = centres[row * BYTES + j], own[i] = centres[mine * BYTES + j];
        }
    }

    __device__ float level(int code, float step) const { return ((float)code - 7.5f) * step; }

    __device__ void scores(int tile)
    {
        float low[LANE_BYTES], high[LANE_BYTES];  // of this warp's centre
#pragma unroll
        for (int i = 0; i < LANE_BYTES; ++i) {
            low[i] = level(common[i] & 15, common_step) + level(own[i] & 15, own_step);
            high[i] = level(common[i] >> 4, common_step) + level(own[i] >> 4, own_step);
        }
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            float sum = 0;
#pragma unroll
            for (int i = 0; i < LANE_BYTES; ++i) {
                int j = threadIdx.x % 32 + 32 * i;
                if (j < BYTES) sum += shared.q[m][j] * low[i] + shared.q[m][j + BYTES] * high[i];
            }
            sum = lane_sum(sum);
            if (threadIdx.x % 32 == 0) shared.centre[m][threadIdx.x / 32] = sum;
            int differing = 0;
#pragma unroll
            for (int j = 0; j < PLANES; ++j) {
                differing *= 2;
#pragma unroll
                for (int i = 0; i < MINE; ++i)
                    if (2 * i + half < WORDS) differing += __popcll(raw[i] ^ shared.planes[m][j][2 * i + half]);
            }
            differing += __shfl_xor_sync(EVERY_LANE, differing, 1);
            float product = 0.5f * (float)(((1 << PLANES) - 1) * KEY_DIM - 2 * differing);
            if (half == 0) shared.s[m][token] = query_step[m] * width * product;
        }
    }

    __device__ float score(int m, int i) const { return shared.s[m][i] + shared.centre[m][i / 16]; }
};
