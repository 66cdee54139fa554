// Codes of WEIGHT_BITS and their scales, for linear.cu and tiled_linear.cu. With LEVELS they are those of edgekv.weights.gaussian, 2
// to 5 bits for levels of inputs behind a rotation, with bfloat16 scales; otherwise whole numbers around their middle.

#ifdef LEVELS  // bytes: of codes with even partners, then of those with odd ones
#define ROTATED 1
#define PLANE_BITS (WEIGHT_BITS & 6)  // of the first plane; a second one has the highest bits of 3 and 5
#define CODE_OF_ZERO 64               // in linear.cu, which adds it to all levels
#else
#define ROTATED 0
#define LEVELS 0, 0
#define FLIPS 0, 0, 0, 0
#define PLANE_BITS WEIGHT_BITS
#define CODE_OF_ZERO (1 << (WEIGHT_BITS - 1))
#endif
#define HAS_SECOND_PLANE (ROTATED && WEIGHT_BITS % 2)
#define ROOT 0.08838834764831845f  // of 1 / 128

__constant__ u32 LEVEL_WORDS[] = {LEVELS};

// Returns the bits of a scale as they are stored; `scale_of` makes a number of them.
__device__ __forceinline__ u32 scale_at(const void* scales, i64 i) { return ROTATED ? ((const u16*)scales)[i] : ((const u32*)scales)[i]; }

__device__ __forceinline__ float scale_of(u32 bits) { return __uint_as_float(ROTATED ? bits << 16 : bits); }

// Rotates the 128 inputs that eight lanes hold; x[k][i] of lane u is input 4 (u + 8 k) + i, before and after. Outputs are still to be
// multiplied by ROOT.
__device__ __forceinline__ void rotate_sixteen(float (&x)[4][4])
{
    const u32 flips[] = {FLIPS};
    int u = threadIdx.x % 8;
    UNROLL for (int k = 0; k < 4; ++k) {
        u32 signs = flips[k] >> 4 * u;
        UNROLL for (int i = 0; i < 4; ++i) x[k][i] = __uint_as_float(__float_as_uint(x[k][i]) ^ (signs << (31 - i) & 1u << 31));
    }
    UNROLL for (int n = 1; n < 16; n *= 2) {
        UNROLL for (int i = 0; i < 16; ++i) {
            if (i & n) continue;
            float &upper = x[i / 4][i % 4], &lower = x[(i + n) / 4][(i + n) % 4], a = upper;
            upper = a + lower, lower = a - lower;
        }
    }
    UNROLL for (int n = 1; n < 8; n *= 2) {
        float sign = u & n ? -1 : 1;
        UNROLL for (int i = 0; i < 16; ++i) x[i / 4][i % 4] = sign * x[i / 4][i % 4] + __shfl_xor_sync(ALL_LANES, x[i / 4][i % 4], n);
    }
}

// A table of the levels of an input and of its partner, the one 64 further, in shared memory. An entry is one word, stored COPIES times:
// byte 0 is the input's level, byte 1 its partner's. The index is a byte of the first plane, extended for 3 and 5 bits by both codes' top
// bits, from the second plane. Bits of x, the input's code, and of p, the partner's (-: of no effect):
//
//     bit of the index     9   8   7   6   5   4   3   2   1   0
//     2 bits                       -   -   p1  p0  -   -   x1  x0
//     3 bits                       -   p2  p1  p0  -   x2  x1  x0
//     4 bits                       p3  p2  p1  p0  x3  x2  x1  x0
//     5 bits               p3  p2  p1  p0  x3  x2  x1  x0  p4  x4
#define PER_BYTE (WEIGHT_BITS == 5 ? 4 : 1)  // entries
#define ENTRIES (256 * PER_BYTE)

// Fills TABLES of them, behind each other; words of the second one have the levels in their upper bytes.
template <int COPIES, int TABLES = 1> __device__ __forceinline__ void fill_levels(u32* table, int zero)
{
    const signed char* levels = (const signed char*)LEVEL_WORDS;
    constexpr int BITS = WEIGHT_BITS % 16, MASK = (1 << BITS) - 1;
    for (int e = threadIdx.x; e < ENTRIES * TABLES; e += blockDim.x) {
        int code = e % ENTRIES / PER_BYTE, top = e % PER_BYTE;
        int a = (code % 16 | top % 2 << 4) & MASK, b = (code / 16 | top / 2 << 4) & MASK;
        u32 pair = ((u8)(levels[b % 2 << BITS | a] + zero) | (u8)(levels[a % 2 << BITS | b] + zero) << 8) << e / ENTRIES * 16;
        uint4 pairs = {pair, pair, pair, pair};
        u32* to = table + e * COPIES;
        if (COPIES < 4) to[0] = pair;
        UNROLL for (int i = 0; i < COPIES / 4; ++i) *(uint4*)(to + (i + e) * 4 % COPIES) = pairs;  // lanes write to different banks
    }
}

// Sets at[k] to the address of this lane's word for inputs a + k and a + k + 64 of a block, a = 4 q, from the words of the planes that
// have their codes: q % (4 * PLANE_BITS) of the first one, q % 4 of the second one.
template <int COPIES> __device__ __forceinline__ void find_levels(const u32* table, u32 code, u32 second_plane, int q, u32 (&at)[4])
{
    constexpr int ENTRY = 4 * COPIES, STRIDE = ENTRY * PER_BYTE;  // bytes
    if (PLANE_BITS == 2) code >>= q / 8 * 2;
    if (WEIGHT_BITS == 3) code = code & 0x33333333 | second_plane >> q / 4 << 2 & 0xcccccccc;
    u32 top = WEIGHT_BITS == 5 ? second_plane >> q / 4 & 0x01010101 | second_plane >> q / 4 >> 3 & 0x02020202 : 0;
    u32 copy = shared_address(table) + threadIdx.x % COPIES * 4;
    UNROLL for (int k = 0; k < 4; ++k) {
        at[k] = dp4a(code, min_of(STRIDE, 128) << 8 * k, copy);
        if (STRIDE == 256) at[k] = dp4a(code, 128u << 8 * k, at[k]);
        if (WEIGHT_BITS == 5) at[k] = dp4a(top, ENTRY << 8 * k, at[k]);
    }
}

// Sets x[h] to the levels of inputs b, b + 64, b + 1 and b + 65, b = 4 q + 2 h, a byte each, for codes as `find_levels` takes them.
template <int COPIES> __device__ __forceinline__ void decode_levels(const u32* table, u32 code, u32 second_plane, int q, u32 (&x)[2])
{
    u32 at[4];
    find_levels<COPIES>(table, code, second_plane, q, at);
    UNROLL for (int h = 0; h < 2; ++h) x[h] = prmt(shared_word(table, at[2 * h]), shared_word(table, at[2 * h + 1]), 0x5410);
}
