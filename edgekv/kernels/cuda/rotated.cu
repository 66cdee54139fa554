// Inputs rotated for weights of 2 to 5 bits (levels.cu).

// Sets y (n, 128 blocks) to x (n, columns) rotated, both float16 (`halves`) or float32. A warp has 128 inputs. Grid (blocks / 4, n).
extern "C" __global__ void __launch_bounds__(THREADS) rotate(const void* x, int columns, int blocks, int halves, void* y)
{
    int block = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32, k = 128 * block + 4 * lane;
    i64 from = (i64)blockIdx.y * columns + k, to = ((i64)blockIdx.y * blocks + block) * 128 + 2 * lane;
    float v[4];
    if (block >= blocks) return;
    UNROLL for (int i = 0; i < 4; ++i)
        v[i] = k + i >= columns ? 0 : halves ? half_to_float(((const u16*)x)[from + i]) : ((const float*)x)[from + i];
    rotate_four(v);
    UNROLL for (int h = 0; h < 2; ++h) {
        if (halves)
            *(u32*)((u16*)y + to + 64 * h) = finite_half(v[h]) | (u32)finite_half(v[h + 2]) << 16;
        else
            ((float*)y)[to + 64 * h] = v[h], ((float*)y)[to + 64 * h + 1] = v[h + 2];
    }
}
