// Keys in KEY_BITS planes or, if KEY_HEADS, up to as many around centres, with queries in whole numbers. KEY_DIM is a
// multiple of 64; store: planes, scale, centres, centre_step, and each head's first plane and their number. A block of 64 tokens has a centre in row 0 and, around it, one per 16 in rows 1 to 4.
// A 32-bit word of the planes has 8 channels of four tokens, QUARTER apart: warp i takes group i of each plane, and of
// its 32 lanes each four take a word of every eighth column.

// Products of queries with the centres: a warp has that of all 64 tokens and that of its 16.
struct Centres {
    static constexpr int COUNT = 1 + WARPS;
    static constexpr int BYTES = KEY_DIM / 2;         // of a centre: byte j has channels j and j + BYTES
    static constexpr int LANE_BYTES = BYTES / 32;     // that a lane takes, side by side
    static constexpr int PAIRS = divide_up(LANE_BYTES, 2);

    const u16* steps;
    const u8* codes;
    u32 common[TILES][PAIRS], own[TILES][PAIRS];
    float common_step[TILES], own_step[TILES];
    float q[ROWS][PAIRS][4], middle[ROWS];  // queries times LIFT for the codes of this lane, and what code 0 gives

    __device__ Centres(const Queries& queries, const Store& store, int g, int m0)
        : steps((const u16*)store.d + (i64)g * (store.capacity / TILE) * COUNT),
          codes((const u8*)store.c + (i64)g * (store.capacity / TILE) * COUNT * BYTES)
    {
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            i64 row = (i64)g * queries.rows + m0 + m;
            bool there = m0 + m < queries.rows;
            middle[m] = 0;
#pragma unroll
            for (int i = 0; i < 4 * PAIRS; ++i) {
                int byte = i / 2, c = (int)threadIdx.x % 32 * LANE_BYTES + byte + i % 2 * BYTES;
                float x = there && byte < LANE_BYTES ? queries.x[row * KEY_DIM + c] : 0;
                q[m][i / 4][i % 4] = x * (LIFT / (1 << i % 4 * 4));
                middle[m] -= 7.5f * x;
            }
        }
    }

    // The codes of row `row` that this lane takes, two bytes to a word.
    __device__ void load_codes(i64 row, u32* to)
    {
        const u8* from = codes + row * BYTES + threadIdx.x % 32 * LANE_BYTES;
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            if (LANE_BYTES % 2 == 0)
                to[i] = ((const u16*)from)[i];
            else
                to[i] = from[2 * i] | (2 * i + 1 < LANE_BYTES ? from[2 * i + 1] << 8 : 0);
        }
    }

    __device__ void load(int u, int tile)
    {
        i64 row = (i64)tile * COUNT, mine = row + 1 + threadIdx.x / 32;
        common_step[u] = half_to_float(steps[row]), own_step[u] = half_to_float(steps[mine]);
        load_codes(row, common[u]);
        load_codes(mine, own[u]);
    }

    // This lane's part of a query's product with the levels code - 7.5.
    __device__ float product(int m, const u32* x) const
    {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 4 * PAIRS; ++i)
            sum = multiply_add(q[m][i / 4][i % 4], __uint_as_float(x[i / 4] & 15u << i % 4 * 4), sum);
        return sum * SINK + middle[m];
    }

    // The score of row m with the centre of this warp's tokens.
    __device__ float score(int u, int m) const { return lane_sum(common_step[u] * product(m, common[u]) + own_step[u] * product(m, own[u])); }
};

struct CentredKeys {
    static constexpr bool PREPARES = false;
    static constexpr int COLUMNS = KEY_DIM / 8, MINE = COLUMNS / 8, QUARTER = TILE / 4;

    struct Shared {
        float centre[TILES][ROWS][WARPS], s[TILES][ROWS][TILE];
        int whole[ROWS][8][COLUMNS];  // twice the queries' numbers, by channel % 8 and column
        float all[ROWS], step[ROWS];  // the sum of the queries' numbers, and what a number of 1 stands for
    };
    Shared& shared;
    Centres centres;
    const u32* planes;
    const u16* scale;
    int end, bits;
    int token;  // the one whose score this thread stores, if it is in the first half of the warp
    u32 raw[TILES][KEY_BITS][MINE];
    float width[TILES];

    __device__ CentredKeys(Shared& shared, const Queries& queries, const Store& store, int g, int m0, int end)
        : shared(shared), centres(queries, store, g, m0),
          planes((const u32*)store.a + (i64)(KEY_HEADS ? ((const int*)store.e)[2 * g] : g * KEY_BITS) * (store.capacity / TILE) *
                     COLUMNS * QUARTER + threadIdx.x / 32 * COLUMNS * 4 + threadIdx.x % 32),
          scale((const u16*)store.b + (i64)g * store.capacity), end(end),
          bits(KEY_HEADS ? ((const int*)store.e)[2 * g + 1] : KEY_BITS),
          token(threadIdx.x / 4 % 4 * QUARTER + threadIdx.x / 32 * 4 + threadIdx.x % 4)
    {
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            i64 row = (i64)g * queries.rows + m0 + m;
            bool there = m0 + m < queries.rows;
            float sum = 0;
            for (int c = threadIdx.x % 32; there && c < KEY_DIM; c += 32) sum += 0.5f * ((const int*)queries.codes)[row * KEY_DIM + c];
            sum = lane_sum(sum);
            if (threadIdx.x == 0) shared.all[m] = sum, shared.step[m] = there ? queries.scale[row] : 0;
            for (int c = threadIdx.x; c < KEY_DIM; c += THREADS)
                shared.whole[m][c % 8][c / 8] = there ? ((const int*)queries.codes)[row * KEY_DIM + c] : 0;
        }
        __syncthreads();
    }

    __device__ void load(int u, int tile)
    {
        int first = tile * TILE;
        bool there = first + token < end && threadIdx.x % 32 < 16;
#pragma unroll
        for (int p = 0; p < KEY_BITS; ++p)
#pragma unroll
            for (int i = 0; i < MINE; ++i) {
                i64 column = ((i64)tile * bits + p) * 4 * COLUMNS + 8 * i;
                raw[u][p][i] = first < end && p < bits ? planes[4 * column] : 0;
            }
        width[u] = there ? half_to_float(scale[first + token]) : 0;
        if (first < end) centres.load(u, tile);
    }

    __device__ void prepare(int tile) {}

    // x = 2 * x + the signed sum in a word's lower half, y likewise with the upper.
    static __device__ __forceinline__ void add_twice(int& x, int& y, u32 sums)
    {
        int low = (int)(short)sums;
        x = 2 * x + low;
        y = 2 * y + (int)(sums - (u32)low) / 65536;
    }

    __device__ void scores(int u, int tile)
    {
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            float sum = centres.score(u, m);
            if (threadIdx.x % 32 == 0) shared.centre[u][m][threadIdx.x / 32] = sum;
            int total[4] = {};  // of tokens QUARTER apart
#pragma unroll
            for (int p = 0; p < KEY_BITS; ++p) {
                if (p >= bits) break;
                u32 even = 0, odd = 0;  // two sums each: of tokens 0 and 1, and of tokens 2 and 3
#pragma unroll
                for (int i = 0; i < MINE; ++i)
#pragma unroll
                    for (int k = 0; k < 8; ++k) {
                        u32 x = (u32)shared.whole[m][k][8 * i + threadIdx.x % 32 / 4];
                        even += (raw[u][p][i] >> k & 0x00010001u) * x;
                        odd += (raw[u][p][i] >> (k + 8) & 0x00010001u) * x;
                    }
                add_twice(total[0], total[1], even);
                add_twice(total[2], total[3], odd);
            }
#pragma unroll
            for (int a = 0; a < 4; ++a)
#pragma unroll
                for (int lane = 4; lane < 32; lane *= 2) total[a] += __shfl_xor_sync(EVERY_LANE, total[a], lane);
            bool odd = threadIdx.x & 4;  // of the four tokens, the one that this lane stores
            int low = odd ? total[1] : total[0], high = odd ? total[3] : total[2], mine = threadIdx.x & 8 ? high : low;
            // sum of number * sign = sum of (2 * number) * bit - sum of number
            float product = (float)mine - ((1 << bits) - 1) * shared.all[m];
            if (threadIdx.x % 32 < 16) shared.s[u][m][token] = shared.step[m] * width[u] * product;
        }
    }

    __device__ float score(int u, int m, int i) const { return shared.s[u][m][i] + shared.centre[u][m][i / 16]; }
};
