// KIVI's codes. x (G, n, D) has its heads `stride` apart, its tokens D.

// Keys per channel of `block` tokens. Grid (blocks of x, G).
extern "C" __global__ void encode_kivi_keys(const float* x, int stride, int d, int bits, u8* codes, u16* step, u16* low,
                                            int blocks, int block, int b0)
{
    int n_bytes = d * bits / 8, top = (1 << bits) - 1;
    i64 at = (i64)blockIdx.y * blocks + b0 + blockIdx.x;
    const float* from = x + (i64)blockIdx.y * stride + (i64)blockIdx.x * block * d;
    low += at * d, step += at * d;
    for (int c = threadIdx.x; c < d; c += blockDim.x) {
        float least = from[c], largest = from[c];
        for (int t = 1; t < block; ++t)
            least = fminf(least, from[(i64)t * d + c]), largest = fmaxf(largest, from[(i64)t * d + c]);
        low[c] = low_end(least);
        step[c] = level_step(largest, low[c], (float)top);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n_bytes * block; i += blockDim.x) {
        int t = i / n_bytes, j = i % n_bytes;
        u32 byte = 0;
        for (int part = 0; part < 8 / bits; ++part) {
            int c = j + part * n_bytes;
            byte |= (u32)level_of(from[(i64)t * d + c], low[c], step[c], top) << part * bits;
        }
        codes[at * n_bytes * block + i] = (u8)byte;
    }
}

// Values per token and span of channels. Grid (n, G), a warp each.
extern "C" __global__ void encode_kivi_values(const float* x, int stride, int d, int bits, u8* codes, u16* step, u16* low,
                                              int spans, int capacity, int t0)
{
    int n_bytes = d * bits / 8, top = (1 << bits) - 1, t = t0 + blockIdx.x, span = d / spans;
    const float* from = x + (i64)blockIdx.y * stride + (i64)blockIdx.x * d;
    step += (i64)blockIdx.y * spans * capacity + t, low += (i64)blockIdx.y * spans * capacity + t;
    for (int i = 0; i < spans; ++i) {
        float least = from[i * span], largest = least;
        for (int c = threadIdx.x; c < span; c += 32)
            least = fminf(least, from[i * span + c]), largest = fmaxf(largest, from[i * span + c]);
        least = -lane_max(-least), largest = lane_max(largest);
        u16 end = low_end(least);
        if (threadIdx.x == 0) low[(i64)i * capacity] = end, step[(i64)i * capacity] = level_step(largest, end, (float)top);
    }
    __syncthreads();
    for (int j = threadIdx.x; j < n_bytes; j += 32) {
        u32 byte = 0;
        for (int part = 0; part < 8 / bits; ++part) {
            int c = j + part * n_bytes;
            i64 at = (i64)(c / span) * capacity;
            byte |= (u32)level_of(from[c], low[at], step[at], top) << part * bits;
        }
        codes[((i64)blockIdx.y * capacity + t) * n_bytes + j] = (u8)byte;
    }
}
