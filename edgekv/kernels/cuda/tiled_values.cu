// Sums of the values of two tiles with the weights of their tokens; for tiled_planes.cu.

// c += weights times PART bits of the codes of tile u, in SLOT.
template <int PART, int SLOT> __device__ __forceinline__ void TiledWarp::multiply_values(int u)
{
    u32 weight[SETS][2];
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
        int m = TOGETHER ? i / 4 : 4 * set + i / 2, tile = TOGETHER ? i / 2 % 2 : u, half = i % 2;
        const u32* words = shared.weights[warp][least(m, ROWS - 1)][tile];
#pragma unroll
        for (int z = 0; z < 2; ++z) {
            int at = PART == 2   ? j + 4 * z + 8 * half
                     : PART == 1 ? j % 2 + 8 * (j / 2) + 2 * z + 4 * half
                                 : 2 * j + z + 8 * half;
            weight[set][z] = tile == u && m < ROWS ? words[at] : 0;
        }
    }
    u32 low = PART == 1 ? 0x01010101u : PART == 2 ? 0x03030303u : 0x0f0f0f0fu, high = low << (PART == 1 ? 2 : 4);
#pragma unroll
    for (int y = 0; y < WIDE; ++y)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            u32 x0 = value[u][SLOT][y][2 * h], x1 = value[u][SLOT][y][2 * h + 1], y0, y1;
            if (PART == 1) x0 >>= 4 * (j / 2), x1 >>= 4 * (j / 2);
            if (PART == 4)
                y0 = value[u][SLOTS - 1][y][2 * h], y1 = value[u][SLOTS - 1][y][2 * h + 1];
            else
                y0 = x0 >> PART, y1 = x1 >> PART;
            u32 lower[4] = {x0 & low, x1 & low, y0 & low, y1 & low};
            u32 upper[4] = {x0 & high, x1 & high, y0 & high, y1 & high};
#pragma unroll
            for (int set = 0; set < SETS; ++set) {
                bool is_upper = i % 2;
                multiply_codes(c[set][y][h], lower, is_upper ? 0 : weight[set][0], is_upper ? 0 : weight[set][1]);
                multiply_codes(c[set][y][h], upper, is_upper ? weight[set][0] : 0, is_upper ? weight[set][1] : 0);
            }
        }
}

__device__ __forceinline__ void TiledWarp::clear_products()
{
#pragma unroll
    for (int set = 0; set < SETS; ++set)
#pragma unroll
        for (int y = 0; y < WIDE; ++y)
#pragma unroll
            for (int k = 0; k < 8; ++k) c[set][y][k / 4][k % 4] = 0;
}

// sum += c, of which a code's 1 stands for `factor` and the upper halves count `times` as much.
__device__ __forceinline__ void TiledWarp::take_products(int u, int times, float factor)
{
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
        int m = TOGETHER ? j / 2 : 4 * set + j, tile = TOGETHER ? j % 2 : u;
        float unit = m < ROWS ? shared.units[warp][least(m, ROWS - 1)][tile] * (factor / times) : 0;
#pragma unroll
        for (int y = 0; y < WIDE; ++y)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int(&each)[4] = c[set][y][h];
                sum[set][y][h][0] += unit * (float)(times * each[0] + each[1]);
                sum[set][y][h][1] += unit * (float)(times * each[2] + each[3]);
            }
    }
}

// The values of the tiles u .. u + n of a step.
template <int PART, int SLOT> __device__ __forceinline__ void TiledWarp::add_part(int u, int n, float factor)
{
    clear_products();
#pragma unroll
    for (int k = 0; k < 2; ++k)
        if (k >= u && k < u + n) multiply_values<PART, SLOT>(k);
    take_products(u, PART == 1 ? 4 : 16, factor);
}

__device__ __forceinline__ void TiledWarp::add(int u, int n)
{
    constexpr int MOST = VALUE_BITS;
    if (value_bits == 1 || MOST == 1) add_part<1, 0>(u, n, 1);
    else if (value_bits == 2 || MOST == 2) add_part<2, 0>(u, n, 1);
    else if (value_bits == 3 || MOST == 3) {
        add_part<2, 0>(u, n, 2);
        add_part<1, SLOTS - 1>(u, n, 1);
    } else add_part<4, 0>(u, n, 1);
}
