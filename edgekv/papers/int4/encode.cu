// Stores x (G, n, D), with heads `stride` apart, as 4-bit codes with a scale and a zero point per token. Grid (n, G), a warp each.
extern "C" __global__ void encode_int4(const float* x, int stride, int d, u8* codes, u16* delta, u8* zero, int capacity,
                                       Counter t0)
{
    const float* from = x + (i64)blockIdx.y * stride + (i64)blockIdx.x * d;
    i64 token = (i64)blockIdx.y * capacity + t0.now() + blockIdx.x;
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
