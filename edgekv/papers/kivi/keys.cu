// KIVI's keys as rows (rows.cu): store.b has the step and store.c the low end, each per channel of GROUP tokens.
template <int BITS> struct KiviRow : Integers<BITS, FROM_LOW> {
    typedef Integers<BITS, FROM_LOW> I;
    static constexpr int PAIRS = divide_up(I::SOME, 2), ENDS = PAIRS * I::PARTS, WORDS = I::CODES + 2 * ENDS;
    const u16 *step, *low;

    __device__ KiviRow(Row::Shared& shared, const Store& store, int g, int end)
        : I(shared, store, g, end), step((const u16*)store.b + (i64)g * (store.capacity / GROUP) * I::WIDTH),
          low((const u16*)store.c + (i64)g * (store.capacity / GROUP) * I::WIDTH)
    {
    }

    static __device__ void load_halves(const u16* from, u32* to)
    {
        if (I::SOME % 2)
            *to = *from;
        else
            for (int i = 0; i < PAIRS; i += least(4, PAIRS)) load_words<least(4, PAIRS)>(from + 2 * i, to + i);
    }

    __device__ void load(int token, int unit, u32* words) const
    {
        I::load_codes(token, unit, words);
#pragma unroll
        for (int part = 0; part < I::PARTS; ++part) {
            i64 at = (i64)(token / GROUP) * I::WIDTH + part * I::BYTES + unit * I::SOME;
            load_halves(step + at, words + I::CODES + part * PAIRS);
            load_halves(low + at, words + I::CODES + ENDS + part * PAIRS);
        }
    }

    __device__ void decode(const u32* words, int token, int unit, float* x) const
    {
#pragma unroll
        for (int j = 0; j < I::VEC; ++j) {
            int word = I::CODES + j / I::SOME * PAIRS + j % I::SOME / 2, shift = j % I::SOME % 2 * 16;
            x[j] = half_to_float((u16)(words[word + ENDS] >> shift)) + I::code(words, j) * half_to_float((u16)(words[word] >> shift));
        }
    }
};
