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

// Splits the fused projection qkv (n, (H + 2 G) * D) of a token into heads, normalises and rotates queries and keys. One
// block per token and head. A norm of 0 elements is none.

struct Projected {
    const float* x;  // of one token and head
    bool is_query, is_value, normalised;
    const float *norm, *cos, *sin;
    int half;
    float size, scale;

    // By all threads of a block; what the scheme of positions needs is moved by the shift.
    __device__ Projected(const float* qkv, const float* cos_table, const float* sin_table, int half_, const int* shift, int n_heads,
                         int n_kv_heads, int head_dim, float scale_, const float* q_norm, const float* k_norm, int has_norm,
                         float eps)
    {
        int token = blockIdx.x, head = blockIdx.y;
        x = qkv + ((i64)token * gridDim.y + head) * head_dim;
        is_query = head < n_heads, is_value = head >= n_heads + n_kv_heads, normalised = has_norm && !is_value;
        norm = is_query ? q_norm : k_norm, half = half_, scale = is_query ? scale_ : 1, size = 1;
        if (half) cos = cos_table + (i64)(token + *shift) * half, sin = sin_table + (i64)(token + *shift) * half;
        if (!normalised) return;
        float sum = 0;
        for (int c = threadIdx.x; c < head_dim; c += THREADS) sum += x[c] * x[c];
        size = sqrtf(block_sum(sum) / head_dim + eps);
    }

    __device__ float operator[](int c) const
    {
        bool turns = !is_value && c < 2 * half;
        int other = c < half ? c + half : c - half;
        float a = x[c], b = turns ? x[other] : 0;
        if (normalised) {
            a = a / size * norm[c];
            if (turns) b = b / size * norm[other];
        }
        if (turns) a = c < half ? a * cos[c] - b * sin[c] : a * cos[other] + b * sin[other];
        return a * scale;
    }
};

// q, k, v have their tokens D apart and their heads `stride`s.
extern "C" __global__ void __launch_bounds__(THREADS)
split_rope(const float* qkv, const float* cos, const float* sin, int half, const int* shift, float* q, int q_stride,
           float* k, int k_stride, float* v, int v_stride, int n_heads, int n_kv_heads, int head_dim, float scale,
           const float* q_norm, const float* k_norm, int normalised, float eps)
{
    let_next_begin();
    wait_for_inputs();
    Projected x(qkv, cos, sin, half, shift, n_heads, n_kv_heads, head_dim, scale, q_norm, k_norm, normalised, eps);
    int token = blockIdx.x, head = blockIdx.y;
    float* out = x.is_query  ? q + (i64)head * q_stride
                 : x.is_value ? v + (i64)(head - n_heads - n_kv_heads) * v_stride
                              : k + (i64)(head - n_heads) * k_stride;
    for (int c = threadIdx.x; c < head_dim; c += THREADS) out[(i64)token * head_dim + c] = x[c];
}

// Also in halves, with zeros in the channels from D to `width`: half_q (H, n, width), half_k and half_v (G, capacity, width)
// from token `first` on. q is written if `keeps_queries`.
extern "C" __global__ void __launch_bounds__(THREADS)
split_rope_half(const float* qkv, const float* cos, const float* sin, int half, const int* shift, float* q, int q_stride,
                float* k, int k_stride, float* v, int v_stride, int n_heads, int n_kv_heads, int head_dim, float scale,
                const float* q_norm, const float* k_norm, int normalised, float eps, int keeps_queries, u16* half_q,
                u16* half_k, u16* half_v, int width, int capacity, int first)
{
    Projected x(qkv, cos, sin, half, shift, n_heads, n_kv_heads, head_dim, scale, q_norm, k_norm, normalised, eps);
    int token = blockIdx.x, head = blockIdx.y, g = head - n_heads - (x.is_value ? n_kv_heads : 0);
    float* out = x.is_query ? q + (i64)head * q_stride : x.is_value ? v + (i64)g * v_stride : k + (i64)g * k_stride;
    u16* half_out = x.is_query ? half_q + ((i64)head * gridDim.x + token) * width
                               : (x.is_value ? half_v : half_k) + ((i64)g * capacity + first + token) * width;
    for (int c = threadIdx.x; c < width; c += THREADS) {
        float y = c < head_dim ? x[c] : 0;
        if (c < head_dim && (keeps_queries || !x.is_query)) out[(i64)token * head_dim + c] = y;
        half_out[c] = finite_half(y);
    }
}
