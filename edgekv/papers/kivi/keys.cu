// Rows (rows.cu) of KIVI's keys: store.b has the step and store.c the low end of each channel of GROUP tokens.
template <int BITS> struct KiviRow : Integers<BITS, FROM_LOW> {
    typedef Integers<BITS, FROM_LOW> I;
    static constexpr int PAIRS = divide_up(I::UNIT_BYTES, 2), ENDS = PAIRS * I::PER_BYTE, WORDS = I::CODE_WORDS + 2 * ENDS;
    const u16 *step, *low;

    __device__ KiviRow(Row::Shared& shared, const Store& store, int g, int end)
        : I(shared, store, g, end), step((const u16*)store.b + (i64)g * (store.capacity / GROUP) * I::WIDTH),
          low((const u16*)store.c + (i64)g * (store.capacity / GROUP) * I::WIDTH)
    {
    }

    static __device__ void load_halves(const u16* from, u32* to)
    {
        if (I::UNIT_BYTES % 2)
            *to = *from;
        else
            for (int i = 0; i < PAIRS; i += min_of(4, PAIRS)) load_words<min_of(4, PAIRS)>(from + 2 * i, to + i);
    }

    __device__ void load(int token, int unit, u32* words) const
    {
        I::load_codes(token, unit, words);
UNROLL for (int part = 0; part < I::PER_BYTE; ++part) {
            i64 at = (i64)(token / GROUP) * I::WIDTH + part * I::BYTES + unit * I::UNIT_BYTES;
            load_halves(step + at, words + I::CODE_WORDS + part * PAIRS);
            load_halves(low + at, words + I::CODE_WORDS + ENDS + part * PAIRS);
        }
    }

    __device__ void decode(const u32* words, int token, int unit, float* x) const
    {
UNROLL for (int j = 0; j < I::VEC; ++j) {
            int word = I::CODE_WORDS + j / I::UNIT_BYTES * PAIRS + j % I::UNIT_BYTES / 2, shift = j % I::UNIT_BYTES % 2 * 16;
            x[j] = half_to_float((u16)(words[word + ENDS] >> shift)) + I::code(words, j) * half_to_float((u16)(words[word] >> shift));
        }
    }
};
