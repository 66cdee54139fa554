// FIER's index over float16 keys (G, capacity, d).

__device__ __forceinline__ float key_at(const u16* keys, int d, int t, int c) { return half_to_float(keys[(i64)t * d + c]); }

// Grid (blocks from b0 on, G). signs (G, words, d), levels (G, groups, 2, d).
extern "C" __global__ void encode_fier(const u16* keys, int capacity, int d, int group, int minmax, u32* signs, u16* levels,
                                       int groups, int words, int b0)
{
    int b = b0 + blockIdx.x;
    keys += ((i64)blockIdx.y * capacity + (i64)b * group) * d;
    levels += ((i64)blockIdx.y * groups + b) * 2 * d;
    signs += ((i64)blockIdx.y * words + (i64)b * (group / 32)) * d;
    for (int c = threadIdx.x; c < d; c += blockDim.x) {
        float centre, step;
        if (minmax) {
            float low = key_at(keys, d, 0, c), high = low;
            for (int t = 1; t < group; ++t) low = fminf(low, key_at(keys, d, t, c)), high = fmaxf(high, key_at(keys, d, t, c));
            centre = (low + high) * 0.5f, step = (high - low) * 0.5f;
        } else {
            float sum = 0, deviation = 0;
            for (int t = 0; t < group; ++t) sum += key_at(keys, d, t, c);
            centre = sum / (float)group;
            for (int t = 0; t < group; ++t) deviation += fabsf(key_at(keys, d, t, c) - centre);
            step = deviation / (float)group;
        }
        u16 half = float_to_half(centre);
        levels[c] = half, levels[d + c] = float_to_half(step);
        for (int w = 0; w < group / 32; ++w) {
            u32 word = 0;
            for (int i = 0; i < 32; ++i) word |= (u32)(key_at(keys, d, 32 * w + i, c) >= half_to_float(half)) << i;
            signs[(i64)w * d + c] = word;
        }
    }
}
