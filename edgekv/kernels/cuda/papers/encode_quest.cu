// Quest's index over float16 keys (G, capacity, d).

__device__ __forceinline__ float key_at(const u16* keys, int d, int t, int c) { return half_to_float(keys[(i64)t * d + c]); }

// Grid (pages from b0 on, G). bounds (G, pages, 2 * d): the largest, then the smallest key.
extern "C" __global__ void encode_pages(const u16* keys, int capacity, int d, int page, u16* bounds, int pages, int b0)
{
    int b = b0 + blockIdx.x;
    keys += ((i64)blockIdx.y * capacity + (i64)b * page) * d;
    bounds += ((i64)blockIdx.y * pages + b) * 2 * d;
    for (int c = threadIdx.x; c < d; c += blockDim.x) {
        float low = key_at(keys, d, 0, c), high = low;
        for (int t = 1; t < page; ++t) low = fminf(low, key_at(keys, d, t, c)), high = fmaxf(high, key_at(keys, d, t, c));
        bounds[c] = float_to_half(high), bounds[d + c] = float_to_half(low);
    }
}
