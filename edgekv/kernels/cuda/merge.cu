// Attention over several sets of tokens from that over each: a set weighs as its part of the sum of all weights.

// out (rows, d) = the weighted sum of parts (n, rows, d). ends (n, rows, 2): the maximum of a part, the sum of its weights.
// Grid (rows).
extern "C" __global__ void merge(const float* parts, const float* ends, int n, int d, float* out)
{
    i64 row = blockIdx.x, rows = gridDim.x;
    float peak = MINUS_INFINITY, total = 0;
    for (int i = 0; i < n; ++i)
        if (ends[(i * rows + row) * 2 + 1] > 0) peak = fmaxf(peak, ends[(i * rows + row) * 2]);
    for (int i = 0; i < n; ++i) {
        const float* end = ends + (i * rows + row) * 2;
        total += end[1] > 0 ? expf(end[0] - peak) * end[1] : 0;
    }
    float factor = total > 0 ? 1 / total : 0;
    for (int c = threadIdx.x; c < d; c += blockDim.x) {
        float sum = 0;
        for (int i = 0; i < n; ++i) {
            const float* end = ends + (i * rows + row) * 2;
            if (end[1] > 0) sum += expf(end[0] - peak) * end[1] * factor * parts[(i * rows + row) * d + c];
        }
        out[row * d + c] = sum;
    }
}
