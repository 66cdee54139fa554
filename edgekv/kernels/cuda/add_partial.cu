// out[i] += sum over the splits of partial (G, splits, row), i over (G, row).
extern "C" __global__ void add_partial(const float* partial, int splits, int row, int n, float* out)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float* from = partial + (i64)(i / row) * splits * row + i % row;
    float sum = 0;
    for (int k = 0; k < splits; ++k) sum += from[(i64)k * row];
    out[i] += sum;
}
