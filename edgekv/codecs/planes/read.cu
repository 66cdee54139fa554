// Rows (rows.cu) of keys and values in planes of bits, in the layouts of edgekv.codecs.planes, for what tiled.cu does not take:
// heads of other widths, and GPUs before sm_80. Where heads differ in bits (KEY_HEADS, VALUE_HEADS), a store has each head's
// first plane and number of planes, and KEY_BITS and VALUE_BITS are the largest numbers.

#ifdef KEY_BITS
// Store: planes, scale, centres, centre_step, heads. A row is a token's centre and behind it its levels times their scale; queries
// are unrounded and behind that rounded.
struct PlaneRow : Row {
    static constexpr int UNIT_CHANNELS = 4;  // channels of a unit
    static constexpr int WIDTH = 2 * KEY_DIM, VEC = 2 * UNIT_CHANNELS, UNITS = KEY_DIM / UNIT_CHANNELS;
    static constexpr int WORDS = KEY_BITS + 4, HALF = KEY_DIM / 2;  // a byte of a centre has channels j, j + HALF
    const u8 *planes, *centres;
    const u16 *scale, *centre_step;
    int bits;

    __device__ PlaneRow(Shared&, const Store& store, int g, int end)
        : centres((const u8*)store.c + (i64)g * (store.capacity / TILE) * 5 * HALF), scale((const u16*)store.b + (i64)g * store.capacity),
          centre_step((const u16*)store.d + (i64)g * (store.capacity / TILE) * 5), bits(KEY_HEADS ? ((const int*)store.e)[2 * g + 1] : KEY_BITS)
    {
        int first = KEY_HEADS ? ((const int*)store.e)[2 * g] : g * KEY_BITS;
        planes = (const u8*)store.a + (i64)first * (store.capacity / TILE) * KEY_DIM * 8;
    }

    static __device__ int channel(int unit, int j) { return unit * UNIT_CHANNELS + j % UNIT_CHANNELS + j / UNIT_CHANNELS * KEY_DIM; }

    __device__ void load(int token, int unit, u32* words) const
    {
        int t = token % TILE, c = unit * UNIT_CHANNELS, place = 4 * (t % 4) + (t / 16 % 2) * 2 + t / 32;
        i64 tile = token / TILE, row = tile * 5 + 1 + t / 16;
        UNROLL for (int p = 0; p < KEY_BITS; ++p)
            words[p] = p < bits ? planes[(((tile * bits + p) * 4 + t % 16 / 4) * (KEY_DIM / 8) + c / 8) * 16 + place] : 0;
        words[KEY_BITS] = scale[token];
        words[KEY_BITS + 1] = centre_step[tile * 5] | (u32)centre_step[row] << 16;
        words[KEY_BITS + 2] = *(const u32*)(centres + tile * 5 * HALF + c % HALF);
        words[KEY_BITS + 3] = *(const u32*)(centres + row * HALF + c % HALF);
    }

    __device__ void decode(const u32* words, int token, int unit, float* x) const
    {
        int c = unit * UNIT_CHANNELS, shift = c < HALF ? 0 : 4;
        float width = half_to_float((u16)words[KEY_BITS]);
        float common_step = half_to_float((u16)words[KEY_BITS + 1]), step = half_to_float((u16)(words[KEY_BITS + 1] >> 16));
        UNROLL for (int j = 0; j < UNIT_CHANNELS; ++j) {
            int at = j * 8 + shift, level = 0;
            x[j] = ((float)(words[KEY_BITS + 2] >> at & 15) - 7.5f) * common_step + ((float)(words[KEY_BITS + 3] >> at & 15) - 7.5f) * step;
            UNROLL for (int p = 0; p < KEY_BITS; ++p)
                if (p < bits) level = 2 * level + (words[p] >> (c % 8 + j) & 1 ? 1 : -1);
            x[UNIT_CHANNELS + j] = width * (float)level;
        }
    }
};
#endif

#ifdef VALUE_BITS
// Store: codes, scale, heads. Codes of 3 bits are in two pieces, the upper 2 bits and the lowest. Weights are multiplied by the
// tokens' scales and rounded to 8 bits.
struct InterleavedRow : ChannelRow<HEAD_DIM> {
    static constexpr int WORDS = (VALUE_BITS >= 3 ? 2 : 1) * VEC;
    const u8* codes;
    const u16* scale;
    int bits, upper, last;

    __device__ InterleavedRow(Shared&, const Store& store, int g, int end)
        : scale((const u16*)store.b + (i64)g * store.capacity), bits(VALUE_HEADS ? ((const int*)store.c)[2 * g + 1] : VALUE_BITS),
          upper(bits == 3 ? 2 : bits), last(end)
    {
        int first = VALUE_HEADS ? ((const int*)store.c)[2 * g] : g * VALUE_BITS;
        codes = (const u8*)store.a + (i64)first * (store.capacity / TILE) * 8 * WIDTH;
    }

    __device__ void scale_weights(int tile, float& p0, float& p1) const
    {
        int t = tile * TILE + threadIdx.x % 32;
        p0 *= t < last ? half_to_float(scale[t]) : 0, p1 *= t + 32 < last ? half_to_float(scale[t + 32]) : 0;
        float largest = lane_max(fmaxf(p0, p1)), inverse = 255 / fmaxf(largest, 1e-30f);
        p0 = largest / 255 * rintf(p0 * inverse), p1 = largest / 255 * rintf(p1 * inverse);
    }

    __device__ void load(int token, int unit, u32* words) const
    {
        int t = token % TILE;
        const u8* from = codes + ((i64)(token / TILE) * 2 * bits * WIDTH + unit * VEC) * 4 + t % 4;
        UNROLL for (int j = 0; j < VEC; ++j) {
            words[j] = from[t % (8 * upper) / 4 * WIDTH * 4 + 4 * j];
            if (VALUE_BITS >= 3) words[WORDS - VEC + j] = bits == 3 ? from[(4 + t % 8 / 4) * WIDTH * 4 + 4 * j] : 0;
        }
    }

    __device__ void decode(const u32* words, int token, int unit, float* x) const
    {
        int t = token % TILE;
        float middle = 0.5f * ((1 << bits) - 1);
        UNROLL for (int j = 0; j < VEC; ++j) {
            u32 code = words[j] >> t / (8 * upper) * upper & ((1u << upper) - 1);
            if (VALUE_BITS >= 3 && bits == 3) code = 2 * code | (words[WORDS - VEC + j] >> t / 8 & 1);
            x[j] = (float)code - middle;
        }
    }
};
#endif
