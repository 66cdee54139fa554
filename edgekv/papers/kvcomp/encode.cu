// Packs codes (G, n, d) as Huffman codes: a block of `block` <= 256 tokens as one bit string, a thread per token. Grid (blocks of
// codes, G), 256 threads.
extern "C" __global__ void huffman_pack(const u8* codes, int d, const u16* words, const u8* lengths, int levels,
                                        const u8* plain, const u32* offsets, int all_blocks, int b0, int block, u32* pool)
{
    __shared__ u32 sizes[256];
    i64 item = (i64)blockIdx.y * gridDim.x + blockIdx.x;
    int form = plain[item], t = threadIdx.x;
    words += form * levels, lengths += form * levels;
    const u8* token = codes + (item * block + t) * d;
    u32 size = 0;
    if (t < block)
        for (int c = 0; c < d; ++c) size += lengths[token[c]];
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
    u64 pending = 0;  // bits that are not written yet, from word `p` of the string on
    int n_pending = before % 32;
    u32 p = before / 32;
    for (int c = 0; c < d; ++c) {
        pending |= (u64)words[token[c]] << n_pending;
        n_pending += lengths[token[c]];
        if (n_pending >= 32) {
            atomicOr(&to[p++], (u32)pending);
            pending >>= 32, n_pending -= 32;
        }
    }
    if (n_pending > 0) atomicOr(&to[p], (u32)pending);
}
