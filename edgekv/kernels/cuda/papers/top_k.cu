// The k largest columns of a row, by radix selection; one block of SELECT_THREADS per row: `select_top`.

#define SELECT_THREADS 1024
#define SELECT_WARPS (SELECT_THREADS / 32)
#define DIGIT 11  // bits that a round of the selection finds: 11, 11 and 10
#define BINS (1 << DIGIT)
#define FLIGHT 4  // columns that a thread reads before it works on them

// Larger numbers have larger keys; -0 equals 0. NaN has the least.
__device__ __forceinline__ u32 key_of(float x)
{
    if (x != x) return 0;
    u32 bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Of each lane's x, the sum over the lanes up to it.
__device__ __forceinline__ int sum_up_to(int x)
{
    int lane = threadIdx.x % 32;
    for (int i = 1; i < 32; i *= 2) {
        int other = __shfl_sync(EVERY_LANE, x, most(lane - i, 0));
        if (lane >= i) x += other;
    }
    return x;
}

// Of each thread's x, the sum over the threads before it. Between two calls there is a barrier.
__device__ __forceinline__ int sum_before(int x)
{
    __shared__ int sums[SELECT_WARPS];
    int warp = threadIdx.x / 32, upto = sum_up_to(x);
    __syncthreads();
    if (threadIdx.x % 32 == 31) sums[warp] = upto;
    __syncthreads();
    int before = __shfl_sync(EVERY_LANE, sum_up_to(sums[threadIdx.x % 32]), most(warp - 1, 0));
    return (warp > 0 ? before : 0) + upto - x;
}

// s (G, heads * n, columns): rows r * n + j are added up in row j. ends (2, n): lo and hi, if `many`.
extern "C" __global__ void __launch_bounds__(SELECT_THREADS)
select_top(float* s, int group_stride, int row_stride, int heads, int many, const int* ends, int lo, int hi, int k,
           int* chosen, int chosen_stride)
{
    __shared__ int histogram[BINS];
    __shared__ u32 shared_prefix;
    __shared__ int shared_left;
    int n = gridDim.x, j = blockIdx.x;
    if (many) lo = ends[j], hi = ends[n + j];
    float* row = s + (i64)blockIdx.y * group_stride + (i64)j * row_stride;
    for (int i = lo + threadIdx.x; heads > 1 && i < hi; i += SELECT_THREADS) {
        float sum = row[i];
        for (int r = 1; r < heads; ++r) sum += row[(i64)r * n * row_stride + i];
        row[i] = sum;
    }
    u32 prefix = 0, mask = 0, key[FLIGHT];
    int left = least(k, hi - lo);  // of the keys that begin with the prefix
    if (left <= 0) return;
    for (int shift = 32 - DIGIT; mask != 0xffffffffu; shift = most(shift - DIGIT, 0)) {
        for (int i = threadIdx.x; i < BINS; i += SELECT_THREADS) histogram[i] = 0;
        __syncthreads();
        for (int first = lo; first < hi; first += FLIGHT * SELECT_THREADS) {
#pragma unroll
            for (int f = 0; f < FLIGHT; ++f) {
                int i = first + f * SELECT_THREADS + threadIdx.x;
                key[f] = i < hi ? key_of(row[i]) : 0;
            }
#pragma unroll
            for (int f = 0; f < FLIGHT; ++f) {
                int i = first + f * SELECT_THREADS + threadIdx.x;
                if (i < hi && (key[f] & mask) == prefix) atomicAdd(&histogram[(key[f] & ~mask) >> shift], 1);
            }
        }
        __syncthreads();
        // From the largest bin down, BINS / SELECT_THREADS of them to a thread: the one in which the k-th key lies.
        int mine[BINS / SELECT_THREADS], sum = 0;
#pragma unroll
        for (int b = 0; b < BINS / SELECT_THREADS; ++b)
            sum += mine[b] = histogram[BINS - 1 - b - (int)threadIdx.x * (BINS / SELECT_THREADS)];
        int above = sum_before(sum);
#pragma unroll
        for (int b = 0; b < BINS / SELECT_THREADS; ++b) {
            if (above < left && left <= above + mine[b]) {
                shared_prefix = prefix | (u32)(BINS - 1 - b - (int)threadIdx.x * (BINS / SELECT_THREADS)) << shift;
                shared_left = left - above;
            }
            above += mine[b];
        }
        __syncthreads();
        prefix = shared_prefix, left = shared_left;
        mask = 0xffffffffu << shift;
        __syncthreads();
    }
    // A warp has a stretch of columns: it counts its keys above the k-th and its ties, then writes from there on.
    int stretch = 32 * divide_up(hi - lo, SELECT_THREADS), lane = threadIdx.x % 32;
    int first = lo + threadIdx.x / 32 * stretch, last = least(hi, first + stretch), larger = 0, ties = 0;
#pragma unroll 8
    for (int i = first + lane; i < last; i += 32) {
        u32 own = key_of(row[i]);
        larger += own > prefix, ties += own == prefix;
    }
    int larger_before = __shfl_sync(EVERY_LANE, sum_before(larger), 0);
    int ties_before = __shfl_sync(EVERY_LANE, sum_before(ties), 0);
    int* out = chosen + ((i64)blockIdx.y * n + j) * chosen_stride;
    u32 below = (1u << lane) - 1;
#pragma unroll 4
    for (int i = first + lane; i - lane < last; i += 32) {
        u32 own = i < last ? key_of(row[i]) : 0;
        u32 above = __ballot_sync(EVERY_LANE, i < last && own > prefix);
        u32 equal = __ballot_sync(EVERY_LANE, i < last && own == prefix);
        int tie = ties_before + __popc(equal & below);
        int at = larger_before + __popc(above & below) + least(tie, left);
        if (i < last && (own > prefix || (own == prefix && tie < left))) out[at] = i;
        larger_before += __popc(above), ties_before += __popc(equal);
    }
}
