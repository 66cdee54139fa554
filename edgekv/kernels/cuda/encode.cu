// Encoders of numbers and small integers. x (G, n, D) has its heads `stride` apart, its tokens D.

// Grid (n, G).
extern "C" __global__ void encode_f16(const float* x, int stride, int d, u16* store, int capacity, int t0, const int* shift)
{
    const float* from = x + (i64)blockIdx.y * stride + (i64)blockIdx.x * d;
    u16* to = store + ((i64)blockIdx.y * capacity + t0 + *shift + blockIdx.x) * d;
    for (int c = threadIdx.x; c < d; c += blockDim.x) to[c] = float_to_half(from[c]);
}

// The key and the value of one token. Grid (2, G).
extern "C" __global__ void append_f16(const float* k, int k_stride, const float* v, int v_stride, int d, u16* keys, int capacity,
                                      u16* values, int value_capacity, int t0, const int* t0_moves)
{
    bool is_value = blockIdx.x;
    const float* from = is_value ? v + (i64)blockIdx.y * v_stride : k + (i64)blockIdx.y * k_stride;
    i64 row = (i64)blockIdx.y * (is_value ? value_capacity : capacity) + t0 + *t0_moves;
    u16* to = (is_value ? values : keys) + row * d;
    for (int c = threadIdx.x; c < d; c += blockDim.x) to[c] = float_to_half(from[c]);
}

// Grid (n, G).
extern "C" __global__ void encode_f32(const float* x, int stride, int d, float* store, int capacity, int t0, const int* shift)
{
    const float* from = x + (i64)blockIdx.y * stride + (i64)blockIdx.x * d;
    float* to = store + ((i64)blockIdx.y * capacity + t0 + *shift + blockIdx.x) * d;
    for (int c = threadIdx.x; c < d; c += blockDim.x) to[c] = from[c];
}

// Grid (n, G), a warp each.
extern "C" __global__ void encode_int4(const float* x, int stride, int d, u8* codes, u16* delta, u8* zero, int capacity,
                                       int t0, const int* shift)
{
    const float* from = x + (i64)blockIdx.y * stride + (i64)blockIdx.x * d;
    i64 token = (i64)blockIdx.y * capacity + t0 + *shift + blockIdx.x;
    float low = 0, high = 0;
    for (int c = threadIdx.x; c < d; c += 32) low = fminf(low, from[c]), high = fmaxf(high, from[c]);
    low = -lane_max(-low), high = lane_max(high);
    u16 bits = half_above((high - low) / 15);
    float step = half_to_float(bits);
    if (step == 0) step = 1;
    float offset = rintf(-low / step);
    if (threadIdx.x == 0) delta[token] = bits, zero[token] = (u8)offset;
    for (int c = threadIdx.x; c < d / 2; c += 32) {
        u8 a = (u8)fminf(fmaxf(rintf(from[c] / step) + offset, 0), 15);
        u8 b = (u8)fminf(fmaxf(rintf(from[c + d / 2] / step) + offset, 0), 15);
        codes[token * (d / 2) + c] = a | b << 4;
    }
}

// Symmetric codes of `bits` bits in blocks of `block` tokens. Grid (n, G), a warp each.
extern "C" __global__ void encode_sym(const float* x, int stride, int d, int bits, u8* codes, int blocks, int block,
                                      u16* scale, int capacity, int t0, const int* shift)
{
    const float* from = x + (i64)blockIdx.y * stride + (i64)blockIdx.x * d;
    int t = t0 + *shift + blockIdx.x, top = (1 << (bits - 1)) - 1, n_bytes = d * bits / 8;
    float largest = 0;
    for (int c = threadIdx.x; c < d; c += 32) largest = fmaxf(largest, fabsf(from[c]));
    u16 half = half_above(lane_max(largest) / (float)top);
    float step = half_to_float(half);
    if (step == 0) step = 1;
    if (threadIdx.x == 0) scale[(i64)blockIdx.y * capacity + t] = half;
    u8* to = codes + ((i64)blockIdx.y * blocks + t / block) * n_bytes * block + t % block;
    for (int j = threadIdx.x; j < n_bytes; j += 32) {
        u32 byte = 0;
        for (int part = 0; part < 8 / bits; ++part) {
            float level = rintf(from[j + part * n_bytes] / step);
            byte |= (u32)(int)(fminf(fmaxf(level, -(float)top), (float)top) + (float)(top + 1)) << part * bits;
        }
        to[(i64)j * block] = (u8)byte;
    }
}

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
        int j = i / block, t = i % block;
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
