// The k largest columns of a row, by radix selection; one block of SELECT_THREADS per row: `select_top`.

#define SELECT_THREADS 1024
#define BINS 256

// Larger numbers have larger keys; -0 equals 0.
__device__ __forceinline__ u32 key_of(float x)
{
    u32 bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// How many threads of the block before this one have the flag, and how many in all.
__device__ __forceinline__ int rank_of(bool flag, int& total)
{
    __shared__ int counts[SELECT_THREADS / 32];
    u32 votes = __ballot_sync(EVERY_LANE, flag);
    __syncthreads();
    if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = __popc(votes);
    __syncthreads();
    int rank = __popc(votes & ((1u << threadIdx.x % 32) - 1));
    total = 0;
    for (int i = 0; i < SELECT_THREADS / 32; ++i) {
        if (i < (int)threadIdx.x / 32) rank += counts[i];
        total += counts[i];
    }
    return rank;
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
    for (int i = lo + threadIdx.x; i < hi; i += SELECT_THREADS)
        for (int r = 1; r < heads; ++r) row[i] += row[(i64)r * n * row_stride + i];
    u32 prefix = 0, mask = 0;
    int left = least(k, hi - lo);  // of the keys that begin with the prefix
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < BINS; i += SELECT_THREADS) histogram[i] = 0;
        __syncthreads();
        for (int i = lo + threadIdx.x; i < hi; i += SELECT_THREADS) {
            u32 key = key_of(row[i]);
            if ((key & mask) == prefix) atomicAdd(&histogram[key >> shift & (BINS - 1)], 1);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int bin = BINS - 1;
            for (; bin > 0 && histogram[bin] < left; --bin) left -= histogram[bin];
            shared_prefix = prefix | (u32)bin << shift, shared_left = left;
        }
        __syncthreads();
        prefix = shared_prefix, left = shared_left;
        mask |= (u32)(BINS - 1) << shift;
    }
    int found = 0, ties = 0;  // chosen, and taken of the keys that equal the k-th, so far
    int* out = chosen + ((i64)blockIdx.y * n + j) * chosen_stride;
    for (int first = lo; first < hi; first += SELECT_THREADS) {
        int i = first + threadIdx.x, total_ties, total;
        u32 key = i < hi ? key_of(row[i]) : 0;
        bool tie = i < hi && key == prefix;
        int tie_rank = ties + rank_of(tie, total_ties);
        bool taken = i < hi && (key > prefix || (tie && tie_rank < left));
        int at = found + rank_of(taken, total);
        if (taken) out[at] = i;
        found += total, ties += total_ties;
    }
}
