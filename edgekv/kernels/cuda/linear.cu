// Weights (rows, columns) times an activation, and weights widened for cuBLAS. WEIGHT_BITS: 32 or 16 for numbers;
// 8 or 4 for the block-quantised layout of edgekv.weights.quantize, BLOCK inputs to a float32 scale.

#define ROWS_AT_ONCE 4  // by a block, which reads the activation once for them
#define STEP (8 * (int)blockDim.x)  // inputs that a block takes at a time
#define ZERO (1 << (WEIGHT_BITS - 1))
#define QUANTISED (WEIGHT_BITS < 16)

// The 8 weights from input k of a row on, as they lie in memory.
struct Eight {
    u32 words[WEIGHT_BITS / 4];

    __device__ void load(const u8* row, int k, int columns, bool aligned)
    {
        if (QUANTISED || (aligned && k < columns)) {
            load_words<least(4, WEIGHT_BITS / 4)>(row + (i64)k * WEIGHT_BITS / 8, words);
            if (WEIGHT_BITS == 32) load_words<4>(row + (i64)k * 4 + 16, words + WEIGHT_BITS / 8);
            return;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            bool there = k + i < columns;
            if (WEIGHT_BITS == 32) words[i % (WEIGHT_BITS / 4)] = there ? ((const u32*)row)[k + i] : 0;
            if (WEIGHT_BITS == 16) {
                u32 half = there ? ((const u16*)row)[k + i] : 0;
                words[i / 2 % (WEIGHT_BITS / 4)] = i % 2 ? words[i / 2 % (WEIGHT_BITS / 4)] | half << 16 : half;
            }
        }
    }

    // Numbers: weight i. Codes: a denormal, `lifted` by 2 ** position(i) (see common.cu).
    __device__ float operator[](int i) const
    {
        if (WEIGHT_BITS == 32) return __uint_as_float(words[i % (WEIGHT_BITS / 4)]);
        if (WEIGHT_BITS == 16) return half_to_float((u16)(words[i / 2 % (WEIGHT_BITS / 4)] >> i % 2 * 16));
        int per_word = 32 / WEIGHT_BITS;
        u32 word = words[i / per_word % (WEIGHT_BITS / 4)] >> i % per_word / (per_word / 2) * 16;
        return __uint_as_float(word & ((1u << WEIGHT_BITS % 16) - 1) << position(i));
    }

    static constexpr __host__ __device__ int position(int i)
    {
        return QUANTISED ? i % (16 / least(WEIGHT_BITS, 8)) * WEIGHT_BITS : 0;
    }
};

// y[n, r] = onto[n, r] + bias[r] + sum over k of weights[r, k] * x[n, k], where they are there. Grid (groups of rows, n).
extern "C" __global__ void __launch_bounds__(THREADS)
matvec(const u8* weights, const float* scales, const float* bias, int has_bias, const float* onto, int has_onto,
       const float* x, int rows, int columns, int blocks, float* y)
{
    int first = blockIdx.x * ROWS_AT_ONCE;
    int padded = QUANTISED ? blocks * BLOCK : columns;
    i64 row_bytes = (i64)padded * WEIGHT_BITS / 8;
    bool aligned = columns % 8 == 0;
    x += (i64)blockIdx.y * columns;
    float sum[ROWS_AT_ONCE] = {};
#pragma unroll (WEIGHT_BITS == 4 ? 4 : 2)
    for (int k = 8 * threadIdx.x; k < padded; k += STEP) {
        Eight w[ROWS_AT_ONCE];
        float scale[ROWS_AT_ONCE], v[8], total = 0;
#pragma unroll
        for (int r = 0; r < ROWS_AT_ONCE; ++r) {
            int row = least(first + r, rows - 1);
            w[r].load(weights + row * row_bytes, k, columns, aligned);
            if (QUANTISED) scale[r] = scales[(i64)row * blocks + k / BLOCK];
        }
        if (aligned && k < columns) {
            float4 a = *(const float4*)(x + k), b = *(const float4*)(x + k + 4);
            v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = k + i < columns ? x[k + i] : 0;
        }
        if (QUANTISED) {
#pragma unroll
            for (int i = 0; i < 8; ++i) total += v[i], v[i] *= LIFT / (1 << Eight::position(i));
        }
#pragma unroll
        for (int r = 0; r < ROWS_AT_ONCE; ++r) {
            float part = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) part = multiply_add(w[r][i], v[i], part);
            sum[r] += QUANTISED ? scale[r] * (part * SINK - ZERO * total) : part;
        }
    }
    __shared__ float sums[ROWS_AT_ONCE][WARPS];
#pragma unroll
    for (int r = 0; r < ROWS_AT_ONCE; ++r) {
        sum[r] = lane_sum(sum[r]);
        if (threadIdx.x % 32 == 0) sums[r][threadIdx.x / 32] = sum[r];
    }
    __syncthreads();
    int row = first + threadIdx.x;
    if (threadIdx.x >= ROWS_AT_ONCE || row >= rows) return;
    float total = (has_bias ? bias[row] : 0) + (has_onto ? onto[(i64)blockIdx.y * rows + row] : 0);
    for (int i = 0; i < (int)blockDim.x / 32; ++i) total += sums[threadIdx.x][i];
    y[(i64)blockIdx.y * rows + row] = total;
}

// Weight k of a row in float32.
__device__ __forceinline__ float widened(const u8* weights, const float* scales, int columns, int blocks, i64 row, int k)
{
#if WEIGHT_BITS == 32
    return ((const float*)weights)[row * columns + k];
#elif WEIGHT_BITS == 16
    return half_to_float(((const u16*)weights)[row * columns + k]);
#else
    i64 at = row * blocks * BLOCK + k;
    int code = weights[at * WEIGHT_BITS / 8] >> at * WEIGHT_BITS % 8 & ((1u << WEIGHT_BITS % 16) - 1);
    return (float)(code - ZERO) * scales[row * blocks + k / BLOCK];
#endif
}

// out (rows, columns) from codes and scales. Grid (columns / 256, rows).
extern "C" __global__ void widen_weights(const u8* weights, const float* scales, int columns, int blocks, float* out)
{
    int k = blockIdx.x * blockDim.x + threadIdx.x;
    if (k < columns) out[(i64)blockIdx.y * columns + k] = widened(weights, scales, columns, blocks, blockIdx.y, k);
}

// In halves, 8 to a thread, or one if a row of them is not a multiple of 16 bytes. Grid (columns / 8 or 1 / threads, rows).
extern "C" __global__ void widen_to_half(const u8* weights, const float* scales, int columns, int blocks, u16* out)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    i64 row = blockIdx.y;
    out += row * columns;
    if (columns % 8) {
        if (i < columns) out[i] = finite_half(widened(weights, scales, columns, blocks, row, i));
        return;
    }
    if (8 * i >= columns) return;
    uint4 y;
#if QUANTISED
    u32 words[WEIGHT_BITS / 4];
    load_words<WEIGHT_BITS / 4>(weights + (row * blocks * BLOCK + 8 * i) * WEIGHT_BITS / 8, words);
    float scale = scales[row * blocks + 8 * i / BLOCK], x[8];
#pragma unroll
    for (int k = 0; k < 8; ++k)
        x[k] = (float)((int)(words[k * WEIGHT_BITS / 32] >> k * WEIGHT_BITS % 32 & ((1u << WEIGHT_BITS % 16) - 1)) - ZERO) * scale;
#else
    float x[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) x[k] = widened(weights, scales, columns, blocks, row, 8 * i + k);
#endif
    y.x = two_halves(x[0], x[1]), y.y = two_halves(x[2], x[3]), y.z = two_halves(x[4], x[5]), y.w = two_halves(x[6], x[7]);
    *(uint4*)(out + 8 * i) = y;
}
