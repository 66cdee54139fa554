// Packed weights (rows, columns) times an activation that a block keeps in shared memory, in the order in which lanes read
// it. WEIGHT_BITS: 8 or 4, in the layout of edgekv.linear.quantize, BLOCK inputs to a float32 scale; at most MOST_CHUNKS
// times 16 bytes to a row. A warp takes ROWS rows, 2 or 4, at a time, and of each row 32 times ACROSS chunks of 16 bytes.

#define BLOCK_WARPS 16  // of the one block to a multiprocessor
#define ZERO (1 << (WEIGHT_BITS - 1))
#define PER_LOAD (128 / WEIGHT_BITS)  // weights in 16 bytes
#define QUADS (PER_LOAD / 4)
#define ACROSS (4 / ROWS)  // enough bytes on their way also where there are few rows

// A code's bits as a denormal are `lifted` by 2 ** position (see common.cu); two codes of a word's halves have the same.
constexpr __host__ __device__ int position(int i) { return i % (16 / WEIGHT_BITS) * WEIGHT_BITS; }

__device__ __forceinline__ float lifted(const u32* words, int i)
{
    int per_word = 32 / WEIGHT_BITS;
    u32 word = words[i / per_word] >> i % per_word / (per_word / 2) * 16;
    return __uint_as_float(word & ((1u << WEIGHT_BITS) - 1) << position(i));
}

// A lane's chunks c, c + 32 .. of each of a warp's rows, and what the numbers in there are to be multiplied with.
struct Piece {
    u32 words[ROWS][ACROSS][4];
    float scale[ROWS][ACROSS];

    __device__ __forceinline__ void load(const u8* weights, const float* scales, const int* row, int chunks, int blocks, int c)
    {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int u = 0; u < ACROSS; ++u) {
                int at = least(c + 32 * u, chunks - 1);
                load_words<4>(weights + ((i64)row[r] * chunks + at) * 16, words[r][u]);
                scale[r][u] = c + 32 * u < chunks ? scales[(i64)row[r] * blocks + at * PER_LOAD / BLOCK] : 0;
            }
        }
    }
};

// y[n, r] = onto[n, r] + bias[r] + sum over k of weights[r, k] * x[n, k], where they are there. With a norm x[n, k] is times
// norm[k], over the root of the mean square of x[n] plus eps. `gate` 0 or more: row r's activation of that number times
// row `rows` + r. The next 16 bytes are on their way while a warp works on those before, the first ones while the block
// puts x into shared memory. Grid (warps' turns, n).
extern "C" __global__ void __launch_bounds__(32 * BLOCK_WARPS, 1)
packed_matvec(const u8* weights, const float* scales, const float* bias, int has_bias, const float* onto, int has_onto,
              const float* norm, int has_norm, float eps, int gate, const float* x, int rows, int columns, int blocks, float* y)
{
    __shared__ float4 staged[QUADS][MOST_CHUNKS + 1];
    __shared__ float totals[MOST_CHUNKS];
    int chunks = blocks * BLOCK / PER_LOAD, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    bool gated = gate >= 0;
    int outputs = gated ? ROWS / 2 : ROWS, last = gated ? 2 * rows - 1 : rows - 1;
    int first = (blockIdx.x * BLOCK_WARPS + warp) * outputs, step = gridDim.x * BLOCK_WARPS * outputs;
    int row[ROWS], c = lane;
    Piece now, next;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) row[r] = least(gated ? first + r % (ROWS / 2) + r / (ROWS / 2) * rows : first + r, last);
    if (first < rows) now.load(weights, scales, row, chunks, blocks, c);

    x += (i64)blockIdx.y * columns, y += (i64)blockIdx.y * rows, onto += has_onto ? (i64)blockIdx.y * rows : 0;
    float square = 0;
    for (int base = 0; base < chunks * QUADS; base += 32 * BLOCK_WARPS) {
        int f = base + threadIdx.x;
        float v[4] = {}, weight[4];
        if (f < chunks * QUADS) load_four(x, 4 * f, columns, v);
#pragma unroll
        for (int i = 0; i < 4; ++i) square += v[i] * v[i];
        if (has_norm && f < chunks * QUADS) {
            load_four(norm, 4 * f, columns, weight);
#pragma unroll
            for (int i = 0; i < 4; ++i) v[i] *= weight[i];
        }
        float total = lane_sum((v[0] + v[1]) + (v[2] + v[3]), QUADS);
        if (f >= chunks * QUADS) continue;
        if (f % QUADS == 0) totals[f / QUADS] = total;
        float4 four = {v[0] * (LIFT / (1 << position(0))), v[1] * (LIFT / (1 << position(1))),
                       v[2] * (LIFT / (1 << position(2))), v[3] * (LIFT / (1 << position(3)))};
        staged[f % QUADS][f / QUADS] = four;
    }
    float factor = has_norm ? 1 / sqrtf(block_sum(square) / columns + eps) : 1;
    __syncthreads();

    float sum[ROWS] = {};
    while (first < rows) {
        int then = c + 32 * ACROSS, then_first = first;
        bool ends = then - lane >= chunks;
        int old[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) old[r] = row[r];
        if (ends) {
            then = lane, then_first += step;
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
                row[r] = least(gated ? then_first + r % (ROWS / 2) + r / (ROWS / 2) * rows : then_first + r, last);
        }
        if (then_first < rows) next.load(weights, scales, row, chunks, blocks, then);
#pragma unroll
        for (int u = 0; u < ACROSS; ++u) {
            int here = least(c + 32 * u, chunks - 1);
            float part[ROWS] = {};
#pragma unroll
            for (int q = 0; q < QUADS; ++q) {
                float4 v = staged[q][here];
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    part[r] = multiply_add(lifted(now.words[r][u], 4 * q), v.x, part[r]);
                    part[r] = multiply_add(lifted(now.words[r][u], 4 * q + 1), v.y, part[r]);
                    part[r] = multiply_add(lifted(now.words[r][u], 4 * q + 2), v.z, part[r]);
                    part[r] = multiply_add(lifted(now.words[r][u], 4 * q + 3), v.w, part[r]);
                }
            }
            float total = totals[here];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) sum[r] += now.scale[r][u] * (part[r] * SINK - ZERO * total);
        }
        if (ends) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) sum[r] = lane_sum(sum[r]) * factor + (has_bias ? bias[old[r]] : 0);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                if (lane || r >= outputs || first + r >= rows) continue;
                float result = gated ? activate(sum[r], gate) * sum[(r + ROWS / 2) % ROWS] : sum[r];
                y[first + r] = result + (has_onto ? onto[first + r] : 0);
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) sum[r] = 0;
        }
        now = next, c = then, first = then_first;
    }
}
