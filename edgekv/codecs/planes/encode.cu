// Encoders of rotated keys, queries and values. x (G, n, D) is contiguous.

#define CENTRE 16
#define CENTRES (1 + TILE / CENTRE)

// Stores the mean of n tokens as codes (d / 2) and step of one centre, and subtracts the stored mean.
__device__ void encode_mean(float* x, int n, int d, float* mean, u8* codes, u16* step)
{
    float largest = 0;
    for (int c = threadIdx.x; c < d; c += blockDim.x) {
        float sum = x[c];
        for (int t = 1; t < n; ++t) sum += x[(i64)t * d + c];
        mean[c] = sum * (1.0f / n);
        largest = fmaxf(largest, fabsf(mean[c]));
    }
    u16 half = half_of(block_max(largest) / 8);
    float width = half_to_float(half), divisor = width == 0 ? 1 : width;
    if (threadIdx.x == 0) *step = half;
    for (int c = threadIdx.x; c < d; c += blockDim.x) {
        float level = fminf(fmaxf(floorf(mean[c] / divisor) + 8, 0), 15);
        for (int t = 0; t < n; ++t) x[(i64)t * d + c] -= (level - 7.5f) * width;
        mean[c] = level;
    }
    __syncthreads();
    for (int j = threadIdx.x; j < d / 2; j += blockDim.x) codes[j] = (u8)mean[j] | (u8)mean[j + d / 2] << 4;
    __syncthreads();
}

// Stores the centres of blocks of 64 tokens, and of 16 each, and subtracts them from x. Grid (n / 64, G).
extern "C" __global__ void encode_centres(float* x, int d, u8* codes, u16* step, int blocks, Counter t0)
{
    __shared__ float mean[MAX_CHANNELS];
    i64 row = ((i64)blockIdx.y * blocks + t0.now() / TILE + blockIdx.x) * CENTRES;
    float* from = x + ((i64)blockIdx.y * gridDim.x + blockIdx.x) * TILE * d;
    encode_mean(from, TILE, d, mean, codes + row * (d / 2), step + row);
    for (int i = 0; i < TILE / CENTRE; ++i)
        encode_mean(from + (i64)i * CENTRE * d, CENTRE, d, mean, codes + (row + 1 + i) * (d / 2), step + row + 1 + i);
}

// Stores keys in planes, 64 tokens a block, as in edgekv.codecs.planes. Grid (n, G), a warp each.
extern "C" __global__ void encode_keys(const float* x, int d, int bits, u8* planes, int blocks, u16* scale, int capacity, Counter t0)
{
    const float* from = x + ((i64)blockIdx.y * gridDim.x + blockIdx.x) * d;
    int t = t0.now() + blockIdx.x, lane = threadIdx.x, quarter = t % TILE / 16;
    u8* to = planes + ((i64)blockIdx.y * blocks + t / TILE) * bits * d * 8 + t % 16 / 4 * 2 * d;
    int place = 4 * (t % 4) + (quarter & 1) * 2 + (quarter >> 1);
    double square = 0, along = 0;
    for (int c = lane; c < d; c += 32) square += (double)from[c] * from[c];
    square = lane_sum(square);
    float step = (float)(sqrt(square / d) * GAUSS_STEP);
    for (int c = lane; c < d; c += 32) {
        float left = from[c], size = step * (float)(1 << bits) / 4;
        int level = 0;
        for (int p = 0; p < bits; ++p, size /= 2) {
            u32 word = __ballot_sync(ALL_LANES, left >= 0);
            if (lane < 4) to[(i64)p * d * 8 + (c / 8 + lane) * 16 + place] = (u8)(word >> 8 * lane);
            level = 2 * level + (left >= 0 ? 1 : -1);
            left -= left >= 0 ? size : -size;
        }
        along += (double)from[c] * level;
    }
    along = lane_sum(along);
    if (lane == 0) scale[(i64)blockIdx.y * capacity + t] = half_of(square / (along == 0 ? 1 : along));
}

// Sets out (rows, 2 * d) to the queries (rows, d) that PlaneRow needs: unrounded, and behind that in odd halves of a step, times
// the factor of their KV head, of which each has `head_rows`. Grid (rows).
extern "C" __global__ void round_queries(const float* q, int d, const float* factor, int head_rows, float* out)
{
    const float* from = q + (i64)blockIdx.x * d;
    float largest = 0;
    for (int c = 4 * threadIdx.x; c < d; c += 4 * blockDim.x)
        largest = fmaxf(largest, fabsf(from[c]) + fabsf(from[c + 1]) + fabsf(from[c + 2]) + fabsf(from[c + 3]));
    float size = block_max(largest) / MAX_FOUR_SUM, divisor = size == 0 ? 1 : size;
    out += (i64)blockIdx.x * 2 * d;
    for (int c = threadIdx.x; c < d; c += blockDim.x) {
        out[c] = from[c];
        out[d + c] = (floorf(from[c] / divisor) + 0.5f) * size * factor[blockIdx.x / head_rows];
    }
}

// Sets the levels of a row to codes with the best step for a Gaussian of its mean square, by a warp; returns the scale.
__device__ u16 gauss_levels(const float* from, int d, int bits, u8* levels)
{
    double square = 0, along = 0;
    for (int c = threadIdx.x % 32; c < d; c += 32) square += (double)from[c] * from[c];
    square = lane_sum(square);
    float step = (float)(sqrt(square / d) * GAUSS_STEP), divisor = step == 0 ? 1 : step, half = (float)(1 << (bits - 1));
    for (int c = threadIdx.x % 32; c < d; c += 32) {
        float level = fminf(fmaxf(floorf(from[c] / divisor) + half, 0), 2 * half - 1);
        levels[c] = (u8)level;
        along += (double)from[c] * ((double)level - (half - 0.5));
    }
    along = lane_sum(along);
    return half_of(square / (along == 0 ? 1 : along));
}

// Stores values in blocks of 64 tokens, as in edgekv.codecs.planes; levels is scratch (G, n, d). Grid (n / 64, G).
extern "C" __global__ void encode_interleaved(const float* x, int d, int bits, u8* levels, u8* codes,
                                              int blocks, u16* scale, int capacity, Counter t0)
{
    i64 first = ((i64)blockIdx.y * gridDim.x + blockIdx.x) * TILE, b0 = t0.now() / TILE;
    for (int t = threadIdx.x / 32; t < TILE; t += blockDim.x / 32) {
        u16 half = gauss_levels(x + (first + t) * d, d, bits, levels + (first + t) * d);
        if (threadIdx.x % 32 == 0) scale[(i64)blockIdx.y * capacity + (b0 + blockIdx.x) * TILE + t] = half;
    }
    __syncthreads();
    u8* to = codes + ((i64)blockIdx.y * blocks + b0 + blockIdx.x) * 2 * bits * d * 4;
    for (int i = threadIdx.x; i < 2 * bits * d * 4; i += blockDim.x) {
        int row = i / (4 * d), c = i / 4 % d, lane = i % 4;
        bool split = bits == 3;  // the upper 2 bits in rows 0..3, the lowest in rows 4 and 5
        int part = !split ? bits : row < 4 ? 2 : 1, below = split && row < 4 ? 1 : 0, q = split && row >= 4 ? row - 4 : row;
        u32 byte = 0;
        for (int k = 0; k < 8 / part; ++k) {
            u32 level = levels[(first + 8 * part * k + 4 * q + lane) * d + c];
            byte |= (level >> below & ((1u << part) - 1)) << part * k;
        }
        to[i] = (u8)byte;
    }
}
