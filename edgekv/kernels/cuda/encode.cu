// Encoders of numbers and symmetric integers. x (G, n, D) has its heads `stride` apart, its tokens D.

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
    let_next_begin();
    wait_for_inputs();
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
