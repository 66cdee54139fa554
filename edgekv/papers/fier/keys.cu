// Rows (rows.cu) of FIER's keys: a bit per element chooses one of two levels per channel and GROUP of tokens. Store: signs
// (G, words, WIDTH), a word of 32 tokens per channel, and levels (G, groups, 2, WIDTH), centre and step.
struct FierRow : ChannelRow<KEY_DIM> {
    static constexpr int WORDS = 2 * VEC;
    const u32* signs;
    const u16* levels;

    __device__ FierRow(Shared&, const Store& store, int g, int end)
        : signs((const u32*)store.a + (i64)g * (store.capacity / 32) * WIDTH),
          levels((const u16*)store.b + (i64)g * (store.capacity / GROUP) * 2 * WIDTH)
    {
    }

    __device__ void load(int token, int unit, u32* words) const
    {
        const u16* group = levels + (i64)(token / GROUP) * 2 * WIDTH + unit * VEC;
        load_words<VEC>(signs + (i64)(token / 32) * WIDTH + unit * VEC, words);
UNROLL for (int j = 0; j < VEC; ++j) words[VEC + j] = group[j] | (u32)group[WIDTH + j] << 16;
    }

    __device__ void decode(const u32* words, int token, int unit, float* x) const
    {
UNROLL for (int j = 0; j < VEC; ++j) {
            float centre = half_to_float((u16)words[VEC + j]), step = half_to_float((u16)(words[VEC + j] >> 16));
            x[j] = words[j] >> token % 32 & 1 ? centre + step : centre - step;
        }
    }
};
