// Inputs rotated for weights of 2 to 5 bits (levels.cu).

// Sets y (n, 128 blocks) to x (n, columns) rotated, both float16 (`halves`) or float32. Grid (blocks / 16, n).
extern "C" __global__ void __launch_bounds__(THREADS) rotate(const void* x, int columns, int blocks, int halves, void* y)
{
    int thread = blockIdx.x * THREADS + threadIdx.x, block = thread / 8, u = thread % 8;
    i64 from = (i64)blockIdx.y * columns, to = ((i64)blockIdx.y * blocks + block) * 128;
    float v[4][4];
    UNROLL for (int k = 0; k < 4; ++k) {
        UNROLL for (int i = 0; i < 4; ++i) {
            int at = 128 * block + 4 * (u + 8 * k) + i;
            v[k][i] = at >= columns ? 0 : halves ? half_to_float(((const u16*)x)[from + at]) : ((const float*)x)[from + at];
        }
    }
    rotate_sixteen(v);
    if (block >= blocks) return;
    UNROLL for (int k = 0; k < 4; ++k) {
        i64 at = to + 4 * (u + 8 * k);
        if (halves) {
            u16* half = (u16*)y + at;
            UNROLL for (int i = 0; i < 4; ++i) half[i] = finite_half(v[k][i] * ROOT);
        } else {
            UNROLL for (int i = 0; i < 4; ++i) ((float*)y)[at + i] = v[k][i] * ROOT;
        }
    }
}
