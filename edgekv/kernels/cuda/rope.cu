// Splits the fused projection qkv (n, (H + 2 G) * D) of a token into heads, normalises and rotates queries and keys.
// One block per token and head; q, k, v have their tokens D apart and their heads `stride`s. A norm of 0 elements is none.
extern "C" __global__ void __launch_bounds__(THREADS)
split_rope(const float* qkv, const float* cos, const float* sin, int half, const int* shift, float* q, int q_stride,
           float* k, int k_stride, float* v, int v_stride, int n_heads, int n_kv_heads, int head_dim, float scale,
           const float* q_norm, const float* k_norm, int normalised, float eps)
{
    int token = blockIdx.x, head = blockIdx.y;
    const float* x = qkv + ((i64)token * gridDim.y + head) * head_dim;
    bool is_query = head < n_heads, is_value = head >= n_heads + n_kv_heads;
    float* out = is_query  ? q + (i64)head * q_stride
                 : is_value ? v + (i64)(head - n_heads - n_kv_heads) * v_stride
                            : k + (i64)(head - n_heads) * k_stride;
    out += (i64)token * head_dim;
    const float* norm = is_query ? q_norm : k_norm;
    float size = 1;
    if (normalised && !is_value) {
        float sum = 0;
        for (int c = threadIdx.x; c < head_dim; c += THREADS) sum += x[c] * x[c];
        size = sqrtf(block_sum(sum) / head_dim + eps);
    }
    for (int c = threadIdx.x; c < head_dim; c += THREADS) {
        bool turns = !is_value && c < 2 * half;
        int other = c < half ? c + half : c - half;
        float a = x[c], b = turns ? x[other] : 0;
        if (normalised && !is_value) {
            a = a / size * norm[c];
            if (turns) b = b / size * norm[other];
        }
        if (turns) {
            i64 at = (i64)(token + *shift) * half + (c < half ? c : other);
            a = c < half ? a * cos[at] - b * sin[at] : a * cos[at] + b * sin[at];
        }
        out[c] = is_query ? a * scale : a;
    }
}
