// Keys as one bit per element and two levels per channel and GROUP of tokens: `scores_fier`. Store: signs (G, words,
// KEY_DIM), a word of 32 tokens per channel, and levels (G, groups, 2, KEY_DIM), centre and step.

struct FierKeys {
    static constexpr int MINE = divide_up(KEY_DIM, 2);  // channels of a warp; two warps share 32 tokens
    struct Shared {
        float q[2][ROWS][KEY_DIM], constant[2][2][ROWS], s[2][ROWS][TILE];  // [32 tokens]..., [32 tokens][warp], [warp]
    };
    Shared& shared;
    const u32* signs;
    const u16* levels;
    const float* x;
    int rows, groups, end, slice, pair;

    __device__ FierKeys(Shared& shared, const Queries& queries, const Store& store, int g, int m0, int end)
        : shared(shared), signs((const u32*)store.a + (i64)g * (store.capacity / 32) * KEY_DIM),
          levels((const u16*)store.b + (i64)g * (store.capacity / GROUP) * 2 * KEY_DIM),
          x(queries.x + ((i64)g * queries.rows + m0) * KEY_DIM), rows(queries.rows - m0), groups(store.capacity / GROUP),
          end(end), slice(threadIdx.x / 64), pair(threadIdx.x / 32 % 2)
    {
    }

    __device__ void load(int tile) {}

    __device__ void scores(int tile)
    {
        int first = tile * TILE + 32 * slice;
        const u16* own = levels + (i64)least(first / GROUP, groups - 1) * 2 * KEY_DIM;
        float constant[ROWS] = {};
        for (int c = threadIdx.x % 64; c < KEY_DIM; c += 64) {
            float centre = half_to_float(own[c]), step = half_to_float(own[KEY_DIM + c]);
#pragma unroll
            for (int m = 0; m < ROWS; ++m) {
                float q = m < rows ? x[(i64)m * KEY_DIM + c] : 0;
                shared.q[slice][m][c] = q * step;
                constant[m] += q * centre;
            }
        }
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            constant[m] = lane_sum(constant[m]);
            if (threadIdx.x % 32 == 0) shared.constant[slice][pair][m] = constant[m];
        }
        __syncthreads();
        float sum[ROWS] = {};
        const u32* words = signs + (i64)(first / 32) * KEY_DIM;
        if (first < end)
#pragma unroll 8
            for (int c = pair * MINE; c < least((pair + 1) * MINE, KEY_DIM); ++c) {
                u32 lower = ~words[c] << (31 - threadIdx.x % 32) & 0x80000000u;  // the sign bit of -step
#pragma unroll
                for (int m = 0; m < ROWS; ++m)
                    sum[m] += __uint_as_float(__float_as_uint(shared.q[slice][m][c]) ^ lower);
            }
#pragma unroll
        for (int m = 0; m < ROWS; ++m) shared.s[pair][m][32 * slice + threadIdx.x % 32] = sum[m];
    }

    __device__ float score(int m, int i) const
    {
        return shared.s[0][m][i] + shared.s[1][m][i] + shared.constant[i / 32][0][m] + shared.constant[i / 32][1][m];
    }
};
