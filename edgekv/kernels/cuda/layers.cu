// What stands between the matrix products: norms, activations, embeddings. One row per block.

extern "C" __global__ void __launch_bounds__(512) rms_norm(const float* x, int size, const float* weight, float eps, float* y)
{
    x += (i64)blockIdx.x * size, y += (i64)blockIdx.x * size;
    float square = 0;
    for (int c = threadIdx.x; c < size; c += blockDim.x) square += x[c] * x[c];
    float length = sqrtf(block_sum(square) / size + eps);
    for (int c = threadIdx.x; c < size; c += blockDim.x) y[c] = x[c] / length * weight[c];
}

extern "C" __global__ void __launch_bounds__(512)
layer_norm(const float* x, int size, const float* weight, const float* bias, float eps, float* y)
{
    x += (i64)blockIdx.x * size, y += (i64)blockIdx.x * size;
    float sum = 0, square = 0;
    for (int c = threadIdx.x; c < size; c += blockDim.x) sum += x[c];
    float mean = block_sum(sum) / size;
    for (int c = threadIdx.x; c < size; c += blockDim.x) square += (x[c] - mean) * (x[c] - mean);
    float deviation = sqrtf(block_sum(square) / size + eps);
    for (int c = threadIdx.x; c < size; c += blockDim.x) y[c] = (x[c] - mean) / deviation * weight[c] + bias[c];
}

#define SILU 0
#define GELU 1
#define GELU_TANH 2
#define RELU 3

__device__ __forceinline__ float activate(float x, int kind)
{
    if (kind == SILU) return x / (1 + expf(-x));
    if (kind == GELU) return 0.5f * x * (1 + erff(x * 0.70710678f));
    if (kind == GELU_TANH) return 0.5f * x * (1 + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
    return fmaxf(x, 0);
}

// Rows of `size` elements, in memory `stride` apart; y is contiguous. Grid (size / threads, rows).
extern "C" __global__ void activation(const float* x, int stride, int size, int kind, float* y)
{
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c < size) y[(i64)blockIdx.y * size + c] = activate(x[(i64)blockIdx.y * stride + c], kind);
}

// Row i of x (n, size) = row ids[i] of the table, plus row start + i of another, which moves with the shift. KIND_* says
// how their elements are stored.
#define KIND_F32 0
#define KIND_F16 1
#define KIND_BF16 2

__device__ __forceinline__ float element(const void* table, int kind, i64 at)
{
    if (kind == KIND_F32) return ((const float*)table)[at];
    u16 bits = ((const u16*)table)[at];
    return kind == KIND_F16 ? half_to_float(bits) : __uint_as_float((u32)bits << 16);
}

extern "C" __global__ void embed(const void* table, int kind, const int* ids, const void* positions, int positions_kind,
                                 int has_positions, int start, const int* shift, int size, float* x)
{
    for (int c = threadIdx.x; c < size; c += blockDim.x) {
        float value = element(table, kind, (i64)ids[blockIdx.x] * size + c);
        if (has_positions)
            value += element(positions, positions_kind, (i64)(start + *shift + blockIdx.x) * size + c);
        x[(i64)blockIdx.x * size + c] = value;
    }
}
