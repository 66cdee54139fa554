// Products of weights (rows, columns) and an activation, and weights widened for cuBLAS. WEIGHT_BITS: 32 or 16 for numbers;
// less for block-quantized codes (levels.cu), BLOCK_INPUTS to a scale.

#define ROWS_AT_ONCE 4  // rows of a thread block, which reads the activation once for them
#define INPUTS_AT_ONCE (8 * (int)blockDim.x)  // of a thread block
#define QUANTIZED (WEIGHT_BITS < 16)
#define COPIES (WEIGHT_BITS == 5 ? 1 : 4)  // of each entry of the table of levels

// Returns input i of the eight that a thread takes together: neighbours, or 4 of a rotated block and their partners.
__device__ __forceinline__ int input(int k, int i) { return ROTATED ? k / 128 * 128 + k % 128 / 2 + i % 4 + i / 4 * 64 : k + i; }

// Eight weights of a row, in their stored form; levels of rotated ones.
struct Eight {
    static constexpr int WORDS = ROTATED ? 2 : WEIGHT_BITS / 4;
    u32 words[WORDS];

    __device__ void load(const u8* row, int k, int columns, bool aligned, const u32* table)
    {
        if (ROTATED) {
            const u32* block = (const u32*)row + k / 128 * 4 * WEIGHT_BITS;
            int q = k % 128 / 8;
            u32 second_plane = HAS_SECOND_PLANE ? block[4 * PLANE_BITS + q % 4] : 0, levels[2];
            decode_levels<COPIES>(table, block[q % (4 * PLANE_BITS)], second_plane, q, levels);
            words[0] = levels[0], words[1] = levels[1];
            return;
        }
        if (QUANTIZED || (aligned && k < columns)) {
            load_words<min_of(4, WORDS)>(row + (i64)k * WEIGHT_BITS / 8, words);
            if (WEIGHT_BITS == 32) load_words<4>(row + (i64)k * 4 + 16, words + WORDS / 2);
            return;
        }
        UNROLL for (int i = 0; i < 8; ++i) {
            bool exists = k + i < columns;
            if (WEIGHT_BITS == 32) words[i % WORDS] = exists ? ((const u32*)row)[k + i] : 0;
            if (WEIGHT_BITS == 16) {
                u32 half = exists ? ((const u16*)row)[k + i] : 0;
                words[i / 2 % WORDS] = i % 2 ? words[i / 2 % WORDS] | half << 16 : half;
            }
        }
    }

    // Returns weight i; of codes a denormal, times 2 ** position(i) (see PRESCALE in common.cu).
    __device__ float operator[](int i) const
    {
        if (WEIGHT_BITS == 32) return __uint_as_float(words[i % WORDS]);
        if (WEIGHT_BITS == 16) return half_to_float((u16)(words[i / 2 % WORDS] >> i % 2 * 16));
        if (ROTATED) return __uint_as_float(words[i % 4 / 2] >> i % 2 * 16 & 255 << position(i));
        int per_word = 32 / WEIGHT_BITS;
        u32 word = words[i / per_word % WORDS] >> i % per_word / (per_word / 2) * 16;
        return __uint_as_float(word & ((1u << WEIGHT_BITS % 16) - 1) << position(i));
    }

    static constexpr __host__ __device__ int position(int i)
    {
        return ROTATED ? i / 4 * 8 : QUANTIZED ? i % (16 / min_of(WEIGHT_BITS, 8)) * WEIGHT_BITS : 0;
    }
};

// y[n, r] = onto[n, r] + bias[r] + sum over k of weights[r, k] * x[n, k]; bias and onto may be null. Of rotated weights x is rotated,
// and `columns` are whole blocks. Grid (groups of rows, n).
extern "C" __global__ void __launch_bounds__(THREADS)
matvec(const u8* weights, const void* scales, const float* bias, const float* onto, const float* x, int rows, int columns,
       int blocks, float* y)
{
    __shared__ u32 table[ROTATED ? ENTRIES * COPIES : 1];
    if (ROTATED) fill_levels<COPIES>(table, CODE_OF_ZERO);
    if (ROTATED) __syncthreads();
    int first = blockIdx.x * ROWS_AT_ONCE;
    int padded = QUANTIZED ? blocks * BLOCK_INPUTS : columns;
    i64 row_bytes = (i64)padded * WEIGHT_BITS / 8;
    bool aligned = columns % 8 == 0;
    x += (i64)blockIdx.y * columns;
    float sum[ROWS_AT_ONCE] = {};
#pragma unroll (WEIGHT_BITS == 4 ? 4 : 2)
    for (int k = 8 * threadIdx.x; k < padded; k += INPUTS_AT_ONCE) {
        Eight w[ROWS_AT_ONCE];
        float scale[ROWS_AT_ONCE], v[8], total = 0;
        UNROLL for (int r = 0; r < ROWS_AT_ONCE; ++r) {
            int row = min_of(first + r, rows - 1);
            w[r].load(weights + row * row_bytes, k, columns, aligned, table);
            if (QUANTIZED) scale[r] = scale_of(scale_at(scales, (i64)row * blocks + k / BLOCK_INPUTS));
        }
        if (aligned && k < columns) {
            float4 a = *(const float4*)(x + input(k, 0)), b = *(const float4*)(x + input(k, 4));
            v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
        } else {
            UNROLL for (int i = 0; i < 8; ++i) v[i] = k + i < columns ? x[k + i] : 0;
        }
        if (QUANTIZED) {
            UNROLL for (int i = 0; i < 8; ++i) total += v[i], v[i] *= PRESCALE / (1 << Eight::position(i));
        }
        UNROLL for (int r = 0; r < ROWS_AT_ONCE; ++r) {
            float part = 0;
            UNROLL for (int i = 0; i < 8; ++i) part = multiply_add(w[r][i], v[i], part);
            sum[r] += QUANTIZED ? scale[r] * (part * POSTSCALE - CODE_OF_ZERO * total) : part;
        }
    }
    __shared__ float sums[ROWS_AT_ONCE][WARPS];
    UNROLL for (int r = 0; r < ROWS_AT_ONCE; ++r) {
        sum[r] = lane_sum(sum[r]);
        if (threadIdx.x % 32 == 0) sums[r][threadIdx.x / 32] = sum[r];
    }
    __syncthreads();
    int row = first + threadIdx.x;
    if (threadIdx.x >= ROWS_AT_ONCE || row >= rows) return;
    float total = (bias ? bias[row] : 0) + (onto ? onto[(i64)blockIdx.y * rows + row] : 0);
    for (int i = 0; i < (int)blockDim.x / 32; ++i) total += sums[threadIdx.x][i];
    y[(i64)blockIdx.y * rows + row] = total;
}

// Sets out (rows, columns) to the weights as float16 (`halves`) or float32, 8 of a row by each thread. `columns` of rotated ones, which
// stay so, are whole blocks. Grid (columns / 8 / threads, any).
extern "C" __global__ void widen(const u8* weights, const void* scales, int rows, int columns, int blocks, void* out, int halves)
{
    __shared__ u32 table[ROTATED ? ENTRIES * COPIES : 1];
    if (ROTATED) fill_levels<COPIES>(table, CODE_OF_ZERO);
    if (ROTATED) __syncthreads();
    int k = 8 * (blockIdx.x * blockDim.x + threadIdx.x), padded = QUANTIZED ? blocks * BLOCK_INPUTS : columns;
    if (k >= columns) return;
    i64 row_bytes = (i64)padded * WEIGHT_BITS / 8;
    bool aligned = columns % 8 == 0;
    for (i64 row = blockIdx.y; row < rows; row += gridDim.y) {
        float scale = QUANTIZED ? scale_of(scale_at(scales, row * blocks + k / BLOCK_INPUTS)) : 1, x[8];
        Eight w;
        w.load(weights + row * row_bytes, k, columns, aligned, table);
        UNROLL for (int i = 0; i < 8; ++i)
            x[i] = QUANTIZED ? (multiply_add(w[i], PRESCALE / (1 << Eight::position(i)), 0) * POSTSCALE - CODE_OF_ZERO) * scale : w[i];
        if (halves && aligned) {
            u32 pairs[4];
            UNROLL for (int i = 0; i < 4; ++i) pairs[i] = finite_half(x[2 * i]) | (u32)finite_half(x[2 * i + 1]) << 16;
            u16* to = (u16*)out + row * columns;
            *(uint2*)(to + input(k, 0)) = uint2{pairs[0], pairs[1]}, *(uint2*)(to + input(k, 4)) = uint2{pairs[2], pairs[3]};
            continue;
        }
        UNROLL for (int i = 0; i < 8; ++i) {
            int c = input(k, i);
            if (c >= columns) break;
            if (halves)
                ((u16*)out)[row * columns + c] = finite_half(x[i]);
            else
                ((float*)out)[row * columns + c] = x[i];
        }
    }
}
