// What all kernels share. C++14 without headers, so that every NVRTC since CUDA 10.2 compiles it.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define THREADS 128  // of a thread block, unless a kernel says otherwise
#define WARPS (THREADS / 32)
#define TILE 64      // tokens that a thread block works on at a time: BLOCK of edgekv.kernels.interface
#define UNROLL _Pragma("unroll")  // a loop whose arrays stay in registers
#define ALL_LANES 0xffffffffu
#define MINUS_INFINITY __int_as_float(0xff800000)

constexpr __host__ __device__ int min_of(int a, int b) { return a < b ? a : b; }
constexpr __host__ __device__ int max_of(int a, int b) { return a > b ? a : b; }
constexpr __host__ __device__ int common_divisor(int a, int b) { return b ? common_divisor(b, a % b) : a; }
constexpr __host__ __device__ int divide_up(int a, int b) { return (a + b - 1) / b; }
// The smallest power of two >= n, and the largest <= n.
constexpr __host__ __device__ int power_above(int n) { return n <= 1 ? 1 : 2 * power_above((n + 1) / 2); }
constexpr __host__ __device__ int power_below(int n) { return n <= 1 ? 1 : 2 * power_below(n / 2); }

struct Sum {
    template <class T> static __device__ __forceinline__ T of(T a, T b) { return a + b; }
};
struct Maximum {
    static __device__ __forceinline__ float of(float a, float b) { return fmaxf(a, b); }
};

// Reduces x over `n` neighbouring lanes (a power of two); each lane gets the result.
template <class Op, class T> __device__ __forceinline__ T reduce_lanes(T x, int n = 32)
{
    for (int i = n / 2; i > 0; i /= 2) x = Op::of(x, __shfl_xor_sync(ALL_LANES, x, i));
    return x;
}

// Reduces x over a block of up to 1024 threads; each thread gets the result. Between two calls there is a barrier.
template <class Op> __device__ __forceinline__ float reduce_block(float x)
{
    __shared__ float parts[32];
    x = reduce_lanes<Op>(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    float result = parts[0];
    for (int i = 1; i < (int)blockDim.x / 32; ++i) result = Op::of(result, parts[i]);
    return result;
}

template <class T> __device__ __forceinline__ T lane_sum(T x, int n = 32) { return reduce_lanes<Sum>(x, n); }
__device__ __forceinline__ float lane_max(float x, int n = 32) { return reduce_lanes<Maximum>(x, n); }
__device__ __forceinline__ float block_sum(float x) { return reduce_block<Sum>(x); }
__device__ __forceinline__ float block_max(float x) { return reduce_block<Maximum>(x); }

// A score as softmax takes it: within the model's cap, if it has one.
__device__ __forceinline__ float capped(float score)
{
#ifdef SCORE_CAP
    return SCORE_CAP * tanhf(score / SCORE_CAP);
#else
    return score;
#endif
}

// Loads N = 1, 2 or 4 words of 4 bytes from an address that is a multiple of 4 * N.
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

// Two powers of two for sums over small codes. The bits of a code inside a word, read as a float, are the denormal number
// code * 2 ** (position - 149). Multiplied by a weight times PRESCALE it needs no conversion; the sum is scaled back by
// POSTSCALE * 2 ** -position. Codes must lie in the lowest 23 bits of the word.
#define PRESCALE 1.2379400392853803e27f  // 2 ** 90
#define POSTSCALE 576460752303423488.0f   // 2 ** 59

// Takes the Walsh-Hadamard transform of rows in shared memory, by CHANNELS / 2 threads each, with pairs CHANNELS / 2 apart in
// every pass; returns the side on which the results are.
template <int CHANNELS> __device__ int walsh_hadamard(float (*x)[2][CHANNELS])
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

// Sums each of x[0 .. N) over the lanes that differ in the bits FROM, 2 * FROM, ... TO / 2 only, and spreads the sums over those
// lanes: a lane is left with n_left() of them in x[0 ..], which were those from index `first` on, if `is_owner`.
template <int N, int FROM, int TO> struct SpreadSum {
    static constexpr int HALF = N % 2 ? N : N / 2;
    typedef SpreadSum<HALF, 2 * FROM, TO> Rest;
    static constexpr __host__ __device__ int n_left() { return Rest::n_left(); }
    template <class T> static __device__ __forceinline__ void run(T* x, int& first, bool& is_owner)
    {
        bool upper = threadIdx.x & FROM;
        UNROLL for (int i = 0; i < HALF; ++i) {
            T sent = N % 2 || upper ? x[i] : x[i + N - HALF];
            T kept = N % 2 || !upper ? x[i] : x[i + N - HALF];
            x[i] = kept + __shfl_xor_sync(ALL_LANES, sent, FROM);
        }
        if (N % 2)
            is_owner = is_owner && !upper;
        else if (upper)
            first += HALF;
        Rest::run(x, first, is_owner);
    }
};
template <int N, int TO> struct SpreadSum<N, TO, TO> {
    static constexpr __host__ __device__ int n_left() { return N; }
    template <class T> static __device__ __forceinline__ void run(T* x, int& first, bool& is_owner) {}
};

// A thread block works on TILES tiles of 64 tokens at a time. A codec takes tile u of them in these steps:
//   load         starts the reads; nothing waits for them before the step that needs them
//   scores       keys write the tile's scores to shared memory; after a barrier `score` returns one of them
//   set_weights  a warp gives the values a row's weights, two tokens per lane; after a barrier `add` sums
// so that one round's reads run during the arithmetic of the round before. An item is a pair of a query row and a tile; a warp
// sets the weights of the items turn * WARPS + its number.
#define ITEMS (ROWS * TILES)
#define ITEMS_PER_WARP divide_up(ITEMS, WARPS)

// Arguments of kernels. Python fills them by the names of their fields (Struct in driver.py).

// A counter of the caches as it was when a step was captured, and the address of its delta, its value now minus that one.
struct Counter {
    int captured;
    const int* delta;
    __device__ int now() const { return captured + *delta; }
};

// The arrays of a key or value store with room for `capacity` tokens per KV head; each codec says what they are.
struct Store {
    const void *a, *b, *c, *d, *e, *f;
    int capacity;
};

// Tokens first .. stop of a pair of stores, the first at `position` of the conversation, in `n_splits` splits.
struct Segment {
    Store keys, values;
    int first, n_splits;
    Counter stop, position;
};

// The positions that queries see: lo .. hi or, unless these are null, limits (2, rows), the lo and the hi of each query. In a
// replay hi grows by `position_delta`, and so does lo unless it is 0.
struct Visible {
    int lo, hi;
    const int *limits, *position_delta;
};

// Scores (G, rows, columns) that are part of a larger array.
struct Scores {
    float* x;
    int group_stride, row_stride;
    __device__ float* row(int g, int m) const { return x + (i64)g * group_stride + (i64)m * row_stride; }
};

// Queries x (G, rows, KEY_DIM), what the keys' codec adds to them (codes: see its `CudaCodec`), and a factor per query (scale (G, rows)).
struct Queries {
    const float* x;
    const void* codes;
    const float* scale;
    int rows;
};

// Tokens t0 .. t1 of a store, the first at `position`, of which queries see the positions lo .. hi.
struct Span {
    int t0, t1, position, lo, hi;
    __device__ bool sees(int t) const
    {
        int at = position + t - t0;
        return t >= t0 && t < t1 && at >= lo && at < hi;
    }
};

// Sets sums[warp][row] to a warp's sum of a row, where x[turn] belongs to row (turn * WARPS + warp) / PER_ROW.
template <int PER_ROW, int ITEMS_EACH, int N> __device__ __forceinline__ void add_by_row(const float (&x)[ITEMS_EACH], float (*sums)[N])
{
    int warp = threadIdx.x / 32;
    bool is_first = threadIdx.x % 32 == 0;
    if (is_first)
        for (int m = 0; m < N; ++m) sums[warp][m] = 0;
    UNROLL for (int turn = 0; turn < ITEMS_EACH; ++turn) {
        float total = lane_sum(x[turn]);
        int m = (turn * WARPS + warp) / PER_ROW;
        if (is_first && m < N) sums[warp][m] += total;
    }
    __syncthreads();
}

// The numbers of activations, as in edgekv.weights.cuda.ACTIVATIONS.
#define SILU 0
#define GELU 1
#define GELU_TANH 2
#define RELU 3
#define IDENTITY 4  // in `activation` only

__device__ __forceinline__ float activate(float x, int kind)
{
    if (kind == SILU) return x / (1 + expf(-x));
    if (kind == GELU) return 0.5f * x * (1 + erff(x * 0.70710678f));
    if (kind == GELU_TANH) return 0.5f * x * (1 + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
    return fmaxf(x, 0);
}
