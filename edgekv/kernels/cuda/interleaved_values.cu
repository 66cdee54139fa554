// Values in VALUE_BITS or, if VALUE_HEADS, up to as many bits, four tokens side by side, summed with weights of 8 bits. Codes
// are (blocks, 2 * bits, HEAD_DIM, 4) bytes a head, as in edgekv.kernels.contract.planes; store.b is the scale, store.c each
// head's first plane and their number.

struct InterleavedValues {
    static constexpr int WORDS = 2 * VALUE_BITS;                         // of a block and channel, at most
    static constexpr int MINE = divide_up(HEAD_DIM, THREADS);            // channels

    struct Shared {
        alignas(16) u32 w[TILES][ROWS][TILE / 4];
        float unit[TILES][ROWS];  // what a weight of 1 stands for
        u32 total[TILES][ROWS];
    };
    Shared& shared;
    const u32* codes;
    const u16* scale;
    int end, bits;
    u32 raw[TILES][MINE][WORDS];
    float width[2];  // of the tokens that this lane weighs
    float sum[ROWS][MINE];

    __device__ InterleavedValues(Shared& shared, const Store& store, int g, int end)
        : shared(shared), codes((const u32*)store.a + (i64)(VALUE_HEADS ? ((const int*)store.c)[2 * g] : g * VALUE_BITS) *
                                    (store.capacity / TILE) * 2 * HEAD_DIM),
          scale((const u16*)store.b + (i64)g * store.capacity), end(end),
          bits(VALUE_HEADS ? ((const int*)store.c)[2 * g + 1] : VALUE_BITS)
    {
#pragma unroll
        for (int m = 0; m < ROWS; ++m)
            for (int k = 0; k < MINE; ++k) sum[m][k] = 0;
    }

    __device__ void load(int u, int tile)
    {
#pragma unroll
        for (int k = 0; k < MINE; ++k) {
            int c = threadIdx.x + k * THREADS;
#pragma unroll
            for (int i = 0; i < WORDS; ++i)
                raw[u][k][i] = c < HEAD_DIM && i < 2 * bits ? codes[((i64)tile * 2 * bits + i) * HEAD_DIM + c] : 0;
        }
        if (u != MY_TILE) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int token = tile * TILE + threadIdx.x % 32 + 32 * i;
            width[i] = token < end ? half_to_float(scale[token]) : 0;
        }
    }

    __device__ void weigh(int u, int m, int turn, float p0, float p1)
    {
        float w0 = p0 * width[0], w1 = p1 * width[1], top = lane_max(fmaxf(w0, w1));
        float inverse = 255 / fmaxf(top, 1e-30f);
        u32 whole0 = (u32)__float2int_rn(w0 * inverse), whole1 = (u32)__float2int_rn(w1 * inverse);
        ((u8*)shared.w[u][m])[threadIdx.x % 32] = (u8)whole0;
        ((u8*)shared.w[u][m])[threadIdx.x % 32 + 32] = (u8)whole1;
        u32 total = lane_sum_u32(whole0 + whole1);
        if (threadIdx.x % 32 == 0) shared.unit[u][m] = top / 255, shared.total[u][m] = total;
    }

    __device__ void rescale(int m, float factor)
    {
#pragma unroll
        for (int k = 0; k < MINE; ++k) sum[m][k] *= factor;
    }

    __device__ void rescale_offset(int turn, float factor) {}

    // Sum over the tokens of a tile of weight * (PART bits of the code, from word FIRST on).
    template <int PART, int FIRST> __device__ __forceinline__ u32 part_sum(const u32* weights, const u32* words)
    {
        u32 total = 0;
#pragma unroll
        for (int i = 0; i < 2 * PART; ++i)
#pragma unroll
            for (int k = 0; k < 8 / PART; ++k) {
                u32 tokens = words[FIRST + i] >> k * PART & ((1u << PART) - 1) * 0x01010101u;
                total = dot_bytes(tokens, weights[i + 2 * PART * k], total);
            }
        return total;
    }

    // Of weight * code; what a smaller VALUE_BITS never reaches stays within its words.
    __device__ __forceinline__ u32 whole_sum(const u32* weights, const u32* words)
    {
        if (bits == 1) return part_sum<1, 0>(weights, words);
        if (bits == 2) return part_sum<VALUE_BITS >= 2 ? 2 : 1, 0>(weights, words);
        if (bits == 3)
            return 2 * part_sum<VALUE_BITS >= 2 ? 2 : 1, 0>(weights, words) + part_sum<1, VALUE_BITS >= 3 ? 4 : 0>(weights, words);
        return part_sum<VALUE_BITS == 4 ? 4 : 1, 0>(weights, words);
    }

    __device__ void add(int u, int tile)
    {
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            u32 weights[TILE / 4];
#pragma unroll
            for (int i = 0; i < TILE / 4; i += 4) load_words<4>(&shared.w[u][m][i], weights + i);
            float unit = shared.unit[u][m], offset = -0.5f * ((1 << bits) - 1) * (float)shared.total[u][m];
#pragma unroll
            for (int k = 0; k < MINE; ++k) {
                u32 total = whole_sum(weights, raw[u][k]);
                sum[m][k] += unit * ((float)total + offset);
            }
        }
    }

    __device__ void finish(float (*out)[HEAD_DIM])
    {
#pragma unroll
        for (int m = 0; m < ROWS; ++m)
            for (int k = 0; k < MINE; ++k)
                if ((int)threadIdx.x + k * THREADS < HEAD_DIM) out[m][threadIdx.x + k * THREADS] += sum[m][k];
        __syncthreads();
    }
};
