// Codes of WEIGHT_BITS and their scales, for linear.cu and tiled_linear.cu. With LEVELS they are those of edgekv.weights.gaussian, 2
// to 5 bits for levels of inputs behind a rotation, with bfloat16 scales; otherwise whole numbers around their middle.

#ifdef LEVELS  // bytes, plus ZERO: of codes with even partners and, unless INVERTS, of those with odd ones
#define ROTATED 1
#define PLANE_BITS (WEIGHT_BITS & 6)  // of the first plane; a second one has the highest bits of 3 and 5
#define ZERO 64
#else
#define ROTATED 0
#define LEVELS 0, 0
#define FLIPS 0, 0, 0, 0
#define PLANE_BITS WEIGHT_BITS
#define ZERO (1 << (WEIGHT_BITS - 1))
#endif
#define INVERTS (WEIGHT_BITS > 3)  // whether levels of codes with odd partners are found as those of inverted codes, with other signs
#define HAS_SECOND_PLANE (ROTATED && WEIGHT_BITS % 2)
#define ROOT 0.08838834764831845f  // of 1 / 128

__device__ __forceinline__ float scale_at(const void* scales, i64 i)
{
    return ROTATED ? __uint_as_float((u32)((const u16*)scales)[i] << 16) : ((const float*)scales)[i];
}

// Returns bits that say which of the inputs i .. i + 3 of a block, i a multiple of 4, change signs in front of the transform.
__device__ __forceinline__ u32 flips_from(int i)
{
    const u32 flips[] = {FLIPS};
    return (i < 64 ? i < 32 ? flips[0] : flips[1] : i < 96 ? flips[2] : flips[3]) >> i % 32;
}

// Rotates 128 inputs, of which lane i of a warp gives 4 i .. 4 i + 3 and gets 2 i, 64 + 2 i, 2 i + 1 and 65 + 2 i.
__device__ __forceinline__ void rotate_four(float (&x)[4])
{
    int lane = threadIdx.x % 32;
    u32 flips = flips_from(4 * lane);
    UNROLL for (int k = 0; k < 4; ++k) x[k] *= flips >> k & 1 ? -ROOT : ROOT;
    float v[4] = {x[0] + x[1] + (x[2] + x[3]), x[0] - x[1] + (x[2] - x[3]), x[0] + x[1] - (x[2] + x[3]), x[0] - x[1] - (x[2] - x[3])};
    UNROLL for (int n = 1; n < 32; n *= 2) {
        UNROLL for (int k = 0; k < 2; ++k) {
            float other = __shfl_xor_sync(ALL_LANES, lane & n ? v[k] : v[k + 2], n);
            float a = lane & n ? other : v[k], b = lane & n ? v[k + 2] : other;
            v[k] = a + b, v[k + 2] = a - b;
        }
    }
    x[0] = v[0], x[1] = v[2], x[2] = v[1], x[3] = v[3];
}

#define ONE 127  // what stands for one in the bytes that are added to inverted levels

// Sets x[h] to the levels, plus ZERO, of inputs a, a + 64, a + 1 and a + 65 of a block, a = 4 q + 2 h, a byte each, less ones[h], in
// which ONE stands for one, from the words of the planes that have their codes: q % (4 * PLANE_BITS) of the first one, q % 4 of the
// second one.
__device__ __forceinline__ void decode_levels(u32 code, u32 second, int q, u32 (&x)[2], u32 (&ones)[2])
{
    const u32 table[] = {LEVELS};
    if (PLANE_BITS == 2) code = code >> q / 8 * 2 & 0x33333333;
    u32 top = HAS_SECOND_PLANE ? second >> q / 4 & 0x11111111 : 0;
    if (WEIGHT_BITS == 3) code |= top << 2;
    // Half a byte of `code` is a code beside its partner.
    u32 odd = (code << 4 & 0x10101010) | (code >> 4 & 0x01010101);
    if (INVERTS)
        code ^= odd * 15, top = (top ^ odd) << 3;
    else
        code |= odd << WEIGHT_BITS;
    UNROLL for (int h = 0; h < 2; ++h, code >>= 16, top >>= 16, odd >>= 16) {
        u32 level = 0;
        UNROLL for (int k = 0; k < (int)sizeof(table); k += 8) {  // 8 levels, of which an index with its highest bit picks 0
            u32 index = k & 8 ? code ^ 0x88888888 : code;
            if (WEIGHT_BITS == 5) index |= k & 16 ? top ^ 0x88888888 : top;
            level |= permute_bytes(table[k / 4], table[k / 4 + 1], index);
        }
        ones[h] = INVERTS ? permute_bytes(ONE << 8, 0, odd) : 0;
        x[h] = level ^ ones[h];  // 127 - level, where ONE is
    }
}
