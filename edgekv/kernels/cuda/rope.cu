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
