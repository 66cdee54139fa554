// What stands between the matrix products: norms, activations, embeddings. One row per block.

__device__ __forceinline__ void put(float* y, float x) { *y = x; }
__device__ __forceinline__ void put(u16* y, float x) { *y = finite_half(x); }

template <class T> __device__ void rms_norm_of(const float* x, int size, const float* weight, float eps, T* y)
{
    x += (i64)blockIdx.x * size, y += (i64)blockIdx.x * size;
    float square = 0;
    for (int c = threadIdx.x; c < size; c += blockDim.x) square += x[c] * x[c];
    float length = sqrtf(block_sum(square) / size + eps);
    for (int c = threadIdx.x; c < size; c += blockDim.x) put(y + c, x[c] / length * weight[c]);
}

extern "C" __global__ void __launch_bounds__(512) rms_norm(const float* x, int size, const float* weight, float eps, float* y)
{
    rms_norm_of(x, size, weight, eps, y);
}

extern "C" __global__ void __launch_bounds__(512) rms_norm_half(const float* x, int size, const float* weight, float eps, u16* y)
{
    rms_norm_of(x, size, weight, eps, y);
}

template <class T> __device__ void layer_norm_of(const float* x, int size, const float* weight, const float* bias, float eps, T* y)
{
    x += (i64)blockIdx.x * size, y += (i64)blockIdx.x * size;
    float sum = 0, square = 0;
    for (int c = threadIdx.x; c < size; c += blockDim.x) sum += x[c];
    float mean = block_sum(sum) / size;
    for (int c = threadIdx.x; c < size; c += blockDim.x) square += (x[c] - mean) * (x[c] - mean);
    float deviation = sqrtf(block_sum(square) / size + eps);
    for (int c = threadIdx.x; c < size; c += blockDim.x) put(y + c, (x[c] - mean) / deviation * weight[c] + bias[c]);
}

extern "C" __global__ void __launch_bounds__(512)
layer_norm(const float* x, int size, const float* weight, const float* bias, float eps, float* y)
{
    layer_norm_of(x, size, weight, bias, eps, y);
}

extern "C" __global__ void __launch_bounds__(512)
layer_norm_half(const float* x, int size, const float* weight, const float* bias, float eps, u16* y)
{
    layer_norm_of(x, size, weight, bias, eps, y);
}

// y (n, size) of x (n, size), or `gated` of x (n, 2 * size): the activation of its first half times the second.
template <class T> __device__ void activation_of(const float* x, int size, int kind, int gated, T* y)
{
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= size) return;
    x += (i64)blockIdx.y * (gated ? 2 * size : size);
    put(y + (i64)blockIdx.y * size + c, activate(x[c], kind) * (gated ? x[size + c] : 1));
}

// Grid (size / threads, n).
extern "C" __global__ void activation(const float* x, int size, int kind, int gated, float* y)
{
    activation_of(x, size, kind, gated, y);
}

extern "C" __global__ void activation_half(const float* x, int size, int kind, int gated, u16* y)
{
    activation_of(x, size, kind, gated, y);
}

// y in halves. Grid (n / threads).
extern "C" __global__ void round_to_half(const float* x, int n, u16* y)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = finite_half(x[i]);
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
