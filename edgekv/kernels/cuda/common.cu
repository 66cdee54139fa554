// Shared by all kernels. C++14 without headers, so that every NVRTC since CUDA 10.2 takes it.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define THREADS 128  // of a block, unless a kernel says otherwise
#define WARPS (THREADS / 32)
#define TILE 64      // tokens that a block works on at a time: the BLOCK of edgekv.kernels.contract.attention
#define UNROLL _Pragma("unroll")  // of a loop whose arrays are to be in registers
#define EVERY_LANE 0xffffffffu
#define MINUS_INFINITY __int_as_float(0xff800000)

constexpr __host__ __device__ int least(int a, int b) { return a < b ? a : b; }
constexpr __host__ __device__ int most(int a, int b) { return a > b ? a : b; }
constexpr __host__ __device__ int common_divisor(int a, int b) { return b ? common_divisor(b, a % b) : a; }
constexpr __host__ __device__ int divide_up(int a, int b) { return (a + b - 1) / b; }
// The least power of two >= n, and the largest <= n.
constexpr __host__ __device__ int power_above(int n) { return n <= 1 ? 1 : 2 * power_above((n + 1) / 2); }
constexpr __host__ __device__ int power_below(int n) { return n <= 1 ? 1 : 2 * power_below(n / 2); }

// Sum and maximum over `n` neighbouring lanes (a power of two), in each of them.
template <class T> __device__ __forceinline__ T lane_sum(T x, int n = 32)
{
    for (int i = n / 2; i > 0; i /= 2)
        x += __shfl_xor_sync(EVERY_LANE, x, i);
    return x;
}

__device__ __forceinline__ float lane_max(float x)
{
    for (int i = 16; i > 0; i /= 2)
        x = fmaxf(x, __shfl_xor_sync(EVERY_LANE, x, i));
    return x;
}

// Sum and maximum over a block of up to 1024 threads, in each of them. Between two calls there is a barrier.
__device__ __forceinline__ float block_sum(float x)
{
    __shared__ float parts[32];
    x = lane_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < (int)blockDim.x / 32; ++i)
        sum += parts[i];
    return sum;
}

__device__ __forceinline__ float block_max(float x)
{
    __shared__ float parts[32];
    x = lane_max(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    float largest = parts[0];
    for (int i = 1; i < (int)blockDim.x / 32; ++i)
        largest = fmaxf(largest, parts[i]);
    return largest;
}

// A score as softmax takes it.
__device__ __forceinline__ float bounded(float score)
{
#ifdef SCORE_CAP
    return SCORE_CAP * tanhf(score / SCORE_CAP);
#else
    return score;
#endif
}

// N words of 4 bytes from an address that is a multiple of 4 * N, N = 1, 2 or 4.
template <int N> __device__ __forceinline__ void load_words(const void* from, u32* to)
{
    if (N == 4) {
        uint4 v = *(const uint4*)from;
        to[0] = v.x, to[N > 1] = v.y, to[2 * (N > 2)] = v.z, to[3 * (N > 3)] = v.w;
    } else if (N == 2) {
        uint2 v = *(const uint2*)from;
        to[0] = v.x, to[N > 1] = v.y;
    } else {
        to[0] = *(const u32*)from;
    }
}

// Inputs k .. k + 3 of x, 0 from `columns` on.
__device__ __forceinline__ void load_four(const float* x, int k, int columns, float* v)
{
    if (columns % 4 == 0 && k < columns) {
        float4 a = *(const float4*)(x + k);
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    } else {
        UNROLL for (int i = 0; i < 4; ++i) v[i] = k + i < columns ? x[k + i] : 0;
    }
}

// Two powers of two for sums over small codes. The bits of a code inside a word, taken as a float, are the denormal
// number code * 2 ** (position - 149): multiplied by a weight times LIFT they need no conversion to a float, and the
// sum times SINK * 2 ** -position is right again. Codes must lie in the lowest 23 bits of the word.
#define LIFT 1.2379400392853803e27f  // 2 ** 90
#define SINK 576460752303423488.0f   // 2 ** 59

// The Walsh-Hadamard transform of rows in shared memory, by CHANNELS / 2 threads each, with pairs CHANNELS / 2 apart in every
// pass; returns on which side they are.
template <int CHANNELS> __device__ int transform(float (*x)[2][CHANNELS])
{
    int side = 0, slot = threadIdx.x / (CHANNELS / 2), i = threadIdx.x % (CHANNELS / 2);
    for (int n = 1; n < CHANNELS; n *= 2, side ^= 1) {
        __syncthreads();
        float a = x[slot][side][i], b = x[slot][side][i + CHANNELS / 2];
        x[slot][side ^ 1][2 * i] = a + b;
        x[slot][side ^ 1][2 * i + 1] = a - b;
    }
    __syncthreads();
    return side;
}

// Sums of x[0 .. N) over the lanes that differ in the bits FROM, 2 * FROM, ... TO / 2 only. They are spread over those
// lanes: each is left with kept() of them in x[0 ..], from index `first` of the original on, if they are `mine`.
template <int N, int FROM, int TO> struct SpreadSum {
    static constexpr int HALF = N % 2 ? N : N / 2;
    typedef SpreadSum<HALF, 2 * FROM, TO> Rest;
    static constexpr __host__ __device__ int kept() { return Rest::kept(); }
    static __device__ __forceinline__ void run(float* x, int& first, bool& mine)
    {
        bool upper = threadIdx.x & FROM;
        UNROLL for (int i = 0; i < HALF; ++i) {
            float other = N % 2 || upper ? x[i] : x[i + N - HALF];
            float own = N % 2 || !upper ? x[i] : x[i + N - HALF];
            x[i] = own + __shfl_xor_sync(EVERY_LANE, other, FROM);
        }
        if (N % 2)
            mine = mine && !upper;
        else if (upper)
            first += HALF;
        Rest::run(x, first, mine);
    }
};
template <int N, int TO> struct SpreadSum<N, TO, TO> {
    static constexpr __host__ __device__ int kept() { return N; }
    static __device__ __forceinline__ void run(float* x, int& first, bool& mine) {}
};

// A block works on TILES tiles of 64 tokens at a time. Tile u of them goes through these steps of a codec:
//   load     starts the reads; nothing waits for them before the step that needs them
//   scores   keys leave the tile's scores in shared memory; after a barrier `score` is one of them
//   weigh    a warp gives a row's weights to the values, two tokens per lane; after a barrier `add` sums
// so that the reads of one round run under the arithmetic of the round before. A warp weighs item turn * WARPS + its
// number of the ITEMS pairs of a row and a tile.
#define ITEMS (ROWS * TILES)
#define TURNS_OF_ITEMS divide_up(ITEMS, WARPS)

// Arguments of kernels. Python fills them by the names of their fields (Struct in driver.py).

// A counter of the caches as it was when a step was recorded, and the address of how far it has moved since.
struct Counter {
    int recorded;
    const int* moved;
    __device__ int now() const { return recorded + *moved; }
};

// The arrays of a key or value store with room for `capacity` tokens per KV head; each codec says what they are.
struct Store {
    const void *a, *b, *c, *d, *e, *f;
    int capacity;
};

// Tokens first .. stop of a pair of stores, the first at `position` of the conversation; `blocks` blocks share them.
struct Segment {
    Store keys, values;
    int first, blocks;
    Counter stop, position;
};

// The positions that queries see: lo .. hi or, unless these are null, limits (2, rows), the lo and the hi of each query. While a
// step is replayed, `shift` moves hi, and lo unless it is 0.
struct Visible {
    int lo, hi;
    const int *limits, *shift;
};

// Scores (G, rows, columns) that are part of a larger array.
struct Scores {
    float* x;
    int group_stride, row_stride;
    __device__ float* row(int g, int m) const { return x + (i64)g * group_stride + (i64)m * row_stride; }
};

// Queries x (G, rows, KEY_DIM), what a codec made of them (codes), and a factor per query (scale (G, rows)).
struct Queries {
    const float* x;
    const void* codes;
    const float* scale;
    int rows;
};

// Tokens t0 .. t1 of a store, the first at `position`; positions lo .. hi are visible.
struct Span {
    int t0, t1, position, lo, hi;
    __device__ bool sees(int t) const
    {
        int at = position + t - t0;
        return t >= t0 && t < t1 && at >= lo && at < hi;
    }
};

// sums[warp][row] = what the lanes of each warp have of a row, where x[turn] is of row (turn * WARPS + warp) / PER_ROW.
template <int PER_ROW, int TURNS, int N> __device__ __forceinline__ void add_by_row(const float (&x)[TURNS], float (*sums)[N])
{
    int warp = threadIdx.x / 32;
    bool speaks = threadIdx.x % 32 == 0;
    if (speaks)
        for (int m = 0; m < N; ++m) sums[warp][m] = 0;
    UNROLL for (int turn = 0; turn < TURNS; ++turn) {
        float total = lane_sum(x[turn]);
        int m = (turn * WARPS + warp) / PER_ROW;
        if (speaks && m < N) sums[warp][m] += total;
    }
    __syncthreads();
}

// The activations by the numbers that edgekv.weights.cuda.ACTIVATIONS gives them.
#define SILU 0
#define GELU 1
#define GELU_TANH 2
#define RELU 3
#define IDENTITY 4  // where a kernel takes it

__device__ __forceinline__ float activate(float x, int kind)
{
    if (kind == SILU) return x / (1 + expf(-x));
    if (kind == GELU) return 0.5f * x * (1 + erff(x * 0.70710678f));
    if (kind == GELU_TANH) return 0.5f * x * (1 + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
    return fmaxf(x, 0);
}
