// n bytes of each of many rows to where token t0 of a store stands whose rows are `row_bytes` long and have `each` bytes for
// `tokens` tokens. Grid (n / threads, rows).
extern "C" __global__ void copy_block(const u8* from, int n, u8* to, int row_bytes, int each, int tokens, int t0,
                                      const int* t0_moves)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    i64 at = (i64)blockIdx.y * row_bytes + (i64)((t0 + *t0_moves) / tokens) * each;
    if (i < n) to[at + i] = from[(i64)blockIdx.y * n + i];
}
