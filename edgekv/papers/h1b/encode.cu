// Packs the signs of rows of numbers as tokens t0 + i of codes (G, blocks, bits / 64, tile). Grid (n, G).
extern "C" __global__ void pack_signs(const float* x, int stride, int bits, u32* codes, int blocks, int tile, Counter t0)
{
    int t = t0.now() + blockIdx.x;
    const float* row = x + (i64)blockIdx.y * stride + (i64)blockIdx.x * bits;
    for (int c = threadIdx.x; c < bits; c += blockDim.x) {
        u32 word = __ballot_sync(ALL_LANES, row[c] >= 0);
        i64 at = (((i64)blockIdx.y * blocks + t / tile) * (bits / 64) + c / 64) * tile + t % tile;
        if (c % 32 == 0) codes[2 * at + c / 32 % 2] = word;
    }
}
