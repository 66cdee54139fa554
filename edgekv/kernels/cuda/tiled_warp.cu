// What a warp of tiled_planes.cu holds, and reads of tiles.

struct TiledWarp {
    TiledShared& shared;
    const uint4 *planes, *codes, *centres;
    const u16 *key_scale, *value_scale, *centre_step;
    int warp, i, j, last, from, to;  // tiles from `last` on are not there; tokens from .. to are seen
    int key_bits, value_bits, rows_of_values[2];
    u32 digits[SETS][2][WIDE], bits[ROWS];
    u32 key[KEY_BITS][WIDE][4], centre[2][WIDE], value[2][SLOTS][WIDE][4];
    uint2 key_width, value_width;
    float step_of_centre[2];
    float peak[ROWS], total[ROWS], offset[ROWS];
    float sum[SETS][WIDE][2][2];
    int c[SETS][WIDE][2][4];

    __device__ TiledWarp(TiledShared& shared, const Store& keys, const Store& values, const Span& span, int last, int g);
    __device__ void take_queries();
    __device__ void load_keys(int tile);
    __device__ void load_scales(int tile);
    __device__ void load_values(int u, int tile);
    __device__ __forceinline__ void multiply_signs(int (&product)[ROWS][4]);
    __device__ __forceinline__ void multiply_centres(int s, float (&near)[2]);
    __device__ __forceinline__ void scores(int tile, const int (&product)[ROWS][4], const float (&near)[SETS][2], const float (&width)[4],
                                           float (&s)[ROWS][4]);
    __device__ __forceinline__ void weigh(const float (&s)[ROWS][4], const float (&width)[4]);
    template <int PART, int SLOT> __device__ __forceinline__ void multiply_values(int u);
    __device__ __forceinline__ void clear_products();
    __device__ __forceinline__ void take_products(int u, int times, float factor);
    template <int PART, int SLOT> __device__ __forceinline__ void add_part(int u, int n, float factor);
    __device__ __forceinline__ void add(int u, int n);
    __device__ __forceinline__ void step(int tile);
    __device__ void finish();

    static __device__ __forceinline__ void unpack(const uint2& x, float (&y)[4])
    {
        y[0] = half_to_float((u16)x.x), y[1] = half_to_float((u16)(x.x >> 16));
        y[2] = half_to_float((u16)x.y), y[3] = half_to_float((u16)(x.y >> 16));
    }
};

__device__ TiledWarp::TiledWarp(TiledShared& shared, const Store& keys, const Store& values, const Span& span, int last, int g)
    : shared(shared), warp(threadIdx.x / 32), i(threadIdx.x % 32 / 4), j(threadIdx.x % 4), last(last)
{
    i64 key_blocks = keys.capacity / TILE, value_blocks = values.capacity / TILE;
    key_bits = KEY_HEADS ? ((const int*)keys.e)[2 * g + 1] : KEY_BITS;
    value_bits = VALUE_HEADS ? ((const int*)values.c)[2 * g + 1] : VALUE_BITS;
    i64 first_key = KEY_HEADS ? ((const int*)keys.e)[2 * g] : g * KEY_BITS;
    i64 first_value = VALUE_HEADS ? ((const int*)values.c)[2 * g] : g * VALUE_BITS;
    planes = (const uint4*)keys.a + first_key * key_blocks * (HEAD_DIM / 2) + i % 4 * (HEAD_DIM / 8) + j;
    codes = (const uint4*)values.a + first_value * value_blocks * (HEAD_DIM / 2) + i;
    centres = (const uint4*)keys.c;
    key_scale = (const u16*)keys.b + (i64)g * keys.capacity + 16 * j + 4 * (i % 4);
    value_scale = (const u16*)values.b + (i64)g * values.capacity + 16 * j + 4 * (i % 4);
    centre_step = (const u16*)keys.d + (i64)g * key_blocks * 5;
    centres = (const uint4*)((const u8*)keys.c + (i64)g * key_blocks * 5 * (HEAD_DIM / 2) + j * (HEAD_DIM / 8));
    rows_of_values[0] = value_bits == 1 ? j % 2 : value_bits == 4 ? 2 * j : j;
    rows_of_values[1] = value_bits == 3 ? 4 + j % 2 : 2 * j + 1;
    from = most(span.t0, span.lo - span.position + span.t0);
    to = least(least(span.t1, span.hi - span.position + span.t0), last * TILE);
#pragma unroll
    for (int m = 0; m < ROWS; ++m) peak[m] = MINUS_INFINITY, total[m] = offset[m] = 0;
#pragma unroll
    for (int s = 0; s < SETS; ++s)
#pragma unroll
        for (int y = 0; y < WIDE; ++y)
            for (int k = 0; k < 4; ++k) sum[s][y][k / 2][k % 2] = 0;
}

// What the block has made of the queries.
__device__ void TiledWarp::take_queries()
{
#pragma unroll
    for (int s = 0; s < SETS; ++s) {
        int m = 4 * s + i / 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32* at = (const u32*)shared.digits[least(m, ROWS - 1)][i % 2] + half * (HEAD_DIM / 8) + j * WIDE;
#pragma unroll
            for (int k = 0; k < WIDE; ++k) digits[s][half][k] = m < ROWS ? at[k] : 0;
        }
    }
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
        bits[m] = 0;
#pragma unroll
        for (int k = 0; k < 2 * WIDE; ++k) {  // bit i of four channels
            u32 four = ((const u32*)shared.whole[m])[(8 * j + 32 * (k / 2)) / 4 + k % 2] >> i & 0x01010101u;
            bits[m] |= (four * 0x01020408u >> 24) << 4 * k;
        }
    }
}

__device__ void TiledWarp::load_keys(int tile)
{
    int at = tile + i / 4;
#pragma unroll
    for (int p = 0; p < KEY_BITS; ++p)
#pragma unroll
        for (int k = 0; k < WIDE; ++k) {
            uint4 x = {0, 0, 0, 0};
            if (at < last && p < key_bits) x = planes[((i64)at * key_bits + p) * (HEAD_DIM / 2) + 4 * k];
            key[p][k][0] = x.x, key[p][k][1] = x.y, key[p][k][2] = x.z, key[p][k][3] = x.w;
        }
}

__device__ void TiledWarp::load_scales(int tile)
{
    int at = tile + i / 4;
    uint2 nothing = {0, 0};
    key_width = at < last ? *(const uint2*)(key_scale + (i64)at * TILE) : nothing;
    value_width = at < last ? *(const uint2*)(value_scale + (i64)at * TILE) : nothing;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
        bool there = i < 5 && tile + u < last;
        i64 row = (i64)(tile + u) * 5 + i;
        step_of_centre[u] = there ? half_to_float(centre_step[row]) : 0;
#pragma unroll
        for (int k = 0; k < WIDE; ++k) centre[u][k] = 0;
        if (there) load_words<WIDE>((const u8*)centres + row * (HEAD_DIM / 2), centre[u]);
    }
}

__device__ void TiledWarp::load_values(int u, int tile)
{
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot)
#pragma unroll
        for (int y = 0; y < WIDE; ++y) {
            uint4 x = {0, 0, 0, 0};
            i64 row = (i64)(tile + u) * 2 * value_bits + rows_of_values[slot];
            if (tile + u < last && (slot == 0 || value_bits > 2)) x = codes[row * (HEAD_DIM / 4) + 8 * y];
            value[u][slot][y][0] = x.x, value[u][slot][y][1] = x.y, value[u][slot][y][2] = x.z, value[u][slot][y][3] = x.w;
        }
}
