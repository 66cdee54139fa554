// Exact causal attention over a prompt, in halves on tensor cores, with a running softmax: scores are never in memory.
// HEAD_DIM channels, padded with zeros to WIDTH, a multiple of 16. For sm_75 and up.

#define QUERY_ROWS 16                        // queries of a warp
#define BLOCK_ROWS (WARPS * QUERY_ROWS)      // queries of a block
#define TOKENS (WIDTH <= 160 ? 64 : 32)      // keys and values at a time
#define STRIDE (WIDTH + 8)                   // between rows in shared memory: 8 rows lie in different banks
#define STEPS (WIDTH / 16)
#define KEEPS_QUERIES (WIDTH <= 128)         // whether queries stay in registers; otherwise they are read again for every tile
// Blocks on a multiprocessor: limits a thread's registers.
#define BLOCKS_AT_ONCE (WIDTH > 128 ? 1 : __CUDA_ARCH__ < 900 ? 2 : 3)
#define LOG2_E 1.44269504f

// Copies tokens t .. t + TOKENS of a head into shared memory, zeros from `end` on.
__device__ __forceinline__ void fetch(u16 (*to)[STRIDE], const u16* from, int t, int end)
{
    UNROLL for (int i = threadIdx.x; i < TOKENS * WIDTH / 8; i += THREADS) {
        int row = i / (WIDTH / 8), c = i % (WIDTH / 8) * 8;
        bool exists = t + row < end;
        cp_async(&to[row][c], from + (i64)(exists ? t + row : 0) * WIDTH + c, exists);
    }
    cp_async_commit();
}

// Loads channels 16 step .. 16 step + 15 of a warp's queries as the left factor of a product.
__device__ __forceinline__ void load_queries(u32 (&a)[4], const u16* q, int row, int n, int step)
{
    int c = 16 * step + threadIdx.x % 4 * 2;
    UNROLL for (int i = 0; i < 4; ++i) {
        int r = row + i % 2 * 8;
        a[i] = r < n ? *(const u32*)(q + (i64)r * WIDTH + c + i / 2 * 8) : 0;
    }
}

// Sets out (n, H * HEAD_DIM) to the attention of scaled queries q (H, n, WIDTH), those of the last n of `earlier` + n tokens with keys
// and values k, v (G, capacity, WIDTH). Token t sees max(0, t + 1 - window) .. t, or 0 .. t with window 0. Grid (blocks of queries, H).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AT_ONCE)
prefill_attention(const u16* q, const u16* k, const u16* v, int n, int earlier, int capacity, int n_rep, int window, u16* out)
{
    __shared__ uint4 key_memory[TOKENS * STRIDE / 8], value_memory[TOKENS * STRIDE / 8];
    u16(*keys)[STRIDE] = (u16(*)[STRIDE])key_memory;
    u16(*values)[STRIDE] = (u16(*)[STRIDE])value_memory;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
    int first_row = (gridDim.x - 1 - blockIdx.x) * BLOCK_ROWS;  // the longest first
    int row = first_row + warp * QUERY_ROWS + lane / 4;         // this lane's: row and row + 8
    int at = earlier + row, first_at = at - lane / 4, last_at = first_at + QUERY_ROWS - 1;
    q += (i64)head * n * WIDTH;
    k += (i64)(head / n_rep) * capacity * WIDTH, v += (i64)(head / n_rep) * capacity * WIDTH;
    int end = earlier + min_of(n, first_row + BLOCK_ROWS);
    int begin = window ? max_of(0, earlier + first_row + 1 - window) / TOKENS * TOKENS : 0;
    fetch(keys, k, begin, end);

    u32 a[KEEPS_QUERIES ? STEPS : 1][4];
    if (KEEPS_QUERIES) {
        UNROLL for (int step = 0; step < STEPS; ++step) load_queries(a[step], q, row, n, step);
    }
    float sum[WIDTH / 8][4], running_max[2] = {MINUS_INFINITY, MINUS_INFINITY}, running_sum[2] = {0, 0};
    UNROLL for (int i = 0; i < WIDTH / 8; ++i) sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = 0;

    for (int t = begin; t < end; t += TOKENS) {
        fetch(values, v, t, end);
        cp_async_wait<1>();  // the keys are there
        __syncthreads();
        float s[TOKENS / 8][4];
        UNROLL for (int i = 0; i < TOKENS / 8; ++i) s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0;
        UNROLL for (int step = 0; step < STEPS; ++step) {
            u32(&left)[4] = a[KEEPS_QUERIES ? step : 0];
            if (!KEEPS_QUERIES) load_queries(left, q, row, n, step);
            UNROLL for (int i = 0; i < TOKENS / 16; ++i) {
                u32 b[4];
                ldmatrix(b, &keys[16 * i + lane / 16 * 8 + lane % 8][16 * step + lane / 8 % 2 * 8]);
                mma_f16(s[2 * i], left, b[0], b[1]);
                mma_f16(s[2 * i + 1], left, b[2], b[3]);
            }
        }
        __syncthreads();
        fetch(keys, k, t + TOKENS, end);

        bool sees_all = t + TOKENS - 1 <= first_at && (!window || t > last_at - window);
        float new_max[2] = {running_max[0], running_max[1]}, rescale[2];
        UNROLL for (int i = 0; i < TOKENS / 8; ++i)
            UNROLL for (int j = 0; j < 4; ++j) {
                int token = t + 8 * i + lane % 4 * 2 + j % 2, query = at + j / 2 * 8;
                if (!sees_all && (token > query || (window && token <= query - window))) s[i][j] = MINUS_INFINITY;
                new_max[j / 2] = fmaxf(new_max[j / 2], s[i][j]);
            }
        UNROLL for (int h = 0; h < 2; ++h) {
            new_max[h] = fmaxf(new_max[h], __shfl_xor_sync(ALL_LANES, new_max[h], 1));
            new_max[h] = fmaxf(new_max[h], __shfl_xor_sync(ALL_LANES, new_max[h], 2));
            float base = new_max[h] == MINUS_INFINITY ? 0 : new_max[h];
            rescale[h] = power_of_two((running_max[h] - base) * LOG2_E);
            running_max[h] = new_max[h];
            running_sum[h] *= rescale[h];
            new_max[h] = base * LOG2_E;
        }
        UNROLL for (int i = 0; i < TOKENS / 8; ++i)
            UNROLL for (int j = 0; j < 4; ++j) {
                s[i][j] = power_of_two(s[i][j] * LOG2_E - new_max[j / 2]);
                running_sum[j / 2] += s[i][j];
            }
        UNROLL for (int i = 0; i < WIDTH / 8; ++i)
            UNROLL for (int j = 0; j < 4; ++j) sum[i][j] *= rescale[j / 2];
        cp_async_wait<1>();  // the values are there
        __syncthreads();
        UNROLL for (int i = 0; i < TOKENS / 16; ++i) {
            u32 p[4] = {two_halves(s[2 * i][0], s[2 * i][1]), two_halves(s[2 * i][2], s[2 * i][3]),
                        two_halves(s[2 * i + 1][0], s[2 * i + 1][1]), two_halves(s[2 * i + 1][2], s[2 * i + 1][3])};
            UNROLL for (int c = 0; c < STEPS; ++c) {
                u32 b[4];
                ldmatrix_transposed(b, &values[16 * i + lane / 8 % 2 * 8 + lane % 8][16 * c + lane / 16 * 8]);
                mma_f16(sum[2 * c], p, b[0], b[1]);
                mma_f16(sum[2 * c + 1], p, b[2], b[3]);
            }
        }
        __syncthreads();
    }
    cp_async_wait<0>();
    UNROLL for (int h = 0; h < 2; ++h) {
        running_sum[h] += __shfl_xor_sync(ALL_LANES, running_sum[h], 1);
        running_sum[h] += __shfl_xor_sync(ALL_LANES, running_sum[h], 2);
        if (row + 8 * h >= n) continue;
        u16* to = out + ((i64)(row + 8 * h) * gridDim.y + head) * HEAD_DIM;
        float factor = running_sum[h] > 0 ? 1 / running_sum[h] : 0;
        UNROLL for (int i = 0; i < WIDTH / 8; ++i)
            UNROLL for (int j = 0; j < 2; ++j) {
                int c = 8 * i + lane % 4 * 2 + j;
                if (c < HEAD_DIM) to[c] = float_to_half(sum[i][2 * h + j] * factor);
            }
    }
}
