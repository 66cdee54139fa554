// Error-bounded levels and their Huffman codes. x and codes (G, n, d); x has its heads `stride` apart.

__device__ __forceinline__ u16 relative_step_of(float least_x, float largest, float relative, u16& low)
{
    low = low_end(least_x);
    return half_above(fmaxf(largest - half_to_float(low), 0) * relative);
}

// Per channel of `block` tokens. Grid (blocks of x, G).
extern "C" __global__ void quantize_channels(const float* x, int stride, int n, int d, float relative, int levels, int block,
                                             u8* codes, u16* low, u16* step, int blocks, int b0)
{
    i64 at = ((i64)blockIdx.y * blocks + b0 + blockIdx.x) * d;
    const float* from = x + (i64)blockIdx.y * stride + (i64)blockIdx.x * block * d;
    u8* to = codes + ((i64)blockIdx.y * n + (i64)blockIdx.x * block) * d;
    for (int c = threadIdx.x; c < d; c += blockDim.x) {
        float smallest = from[c], largest = from[c];
        for (int t = 1; t < block; ++t)
            smallest = fminf(smallest, from[(i64)t * d + c]), largest = fmaxf(largest, from[(i64)t * d + c]);
        u16 end, size = relative_step_of(smallest, largest, relative, end);
        low[at + c] = end, step[at + c] = size;
        for (int t = 0; t < block; ++t) to[(i64)t * d + c] = level_of(from[(i64)t * d + c], end, size, levels - 1);
    }
}

// Per token. Grid (n, G), a warp each.
extern "C" __global__ void quantize_tokens(const float* x, int stride, int d, float relative, int levels, u8* codes, u16* low,
                                           u16* step, int capacity, int t0)
{
    const float* from = x + (i64)blockIdx.y * stride + (i64)blockIdx.x * d;
    i64 at = (i64)blockIdx.y * capacity + t0 + blockIdx.x;
    float smallest = from[0], largest = from[0];
    for (int c = threadIdx.x; c < d; c += 32) smallest = fminf(smallest, from[c]), largest = fmaxf(largest, from[c]);
    u16 end, size = relative_step_of(-lane_max(-smallest), lane_max(largest), relative, end);
    if (threadIdx.x == 0) low[at] = end, step[at] = size;
    for (int c = threadIdx.x; c < d; c += 32)
        codes[((i64)blockIdx.y * gridDim.x + blockIdx.x) * d + c] = level_of(from[c], end, size, levels - 1);
}

// Grid (n, G), a warp each.
extern "C" __global__ void huffman_sizes(const u8* codes, int d, const u8* lengths, u16* bits, int capacity, int t0)
{
    u32 total = 0;
    for (int c = threadIdx.x; c < d; c += 32) total += lengths[codes[((i64)blockIdx.y * gridDim.x + blockIdx.x) * d + c]];
    total = lane_sum_u32(total);
    if (threadIdx.x == 0) bits[(i64)blockIdx.y * capacity + t0 + blockIdx.x] = (u16)total;
}

// A block of `block` <= 256 tokens as one bit string, a thread per token. Grid (blocks of codes, G), 256 threads.
extern "C" __global__ void huffman_pack(const u8* codes, int d, const u16* words, const u8* lengths, int levels,
                                        const u8* plain, const u32* offsets, int all_blocks, int b0, int block, u32* pool)
{
    __shared__ u32 sizes[256];
    i64 item = (i64)blockIdx.y * gridDim.x + blockIdx.x;
    int form = plain[item], t = threadIdx.x;
    words += form * levels, lengths += form * levels;
    const u8* mine = codes + (item * block + t) * d;
    u32 size = 0;
    if (t < block)
        for (int c = 0; c < d; ++c) size += lengths[mine[c]];
    sizes[t] = size;
    __syncthreads();
    u32 before = 0, total = 0;
    for (int i = 0; i < block; ++i) {
        if (i == t) before = total;
        total += sizes[i];
    }
    u32* to = pool + 2 * (i64)offsets[(i64)blockIdx.y * all_blocks + b0 + blockIdx.x];
    for (u32 i = t; i < 2 * ((total + 63) / 64); i += blockDim.x) to[i] = 0;
    __syncthreads();
    if (t >= block) return;
    u64 held = 0;  // bits that are not written yet, from bit `p` of the string on
    int n_held = before % 32;
    u32 p = before / 32;
    for (int c = 0; c < d; ++c) {
        held |= (u64)words[mine[c]] << n_held;
        n_held += lengths[mine[c]];
        if (n_held >= 32) {
            atomicOr(&to[p++], (u32)held);
            held >>= 32, n_held -= 32;
        }
    }
    if (n_held > 0) atomicOr(&to[p], (u32)held);
}
