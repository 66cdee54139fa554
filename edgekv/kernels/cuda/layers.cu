// The layers between matrix products: norms, activations, embeddings, rotations by position, softmax. A thread block takes a row unless
// a kernel says otherwise. y is float16 with `halves`, otherwise float32.

__device__ __forceinline__ void put(void* y, i64 i, float x, int halves)
{
    if (halves)
        ((u16*)y)[i] = finite_half(x);
    else
        ((float*)y)[i] = x;
}

extern "C" __global__ void __launch_bounds__(512) rms_norm(const float* x, int size, const float* weight, float eps, void* y, int halves)
{
    i64 row = (i64)blockIdx.x * size;
    float sum_of_squares = 0;
    for (int c = threadIdx.x; c < size; c += blockDim.x) sum_of_squares += x[row + c] * x[row + c];
    float rms = sqrtf(block_sum(sum_of_squares) / size + eps);
    for (int c = threadIdx.x; c < size; c += blockDim.x) put(y, row + c, x[row + c] / rms * weight[c], halves);
}

extern "C" __global__ void __launch_bounds__(512)
layer_norm(const float* x, int size, const float* weight, const float* bias, float eps, void* y, int halves)
{
    i64 row = (i64)blockIdx.x * size;
    x += row;
    float sum = 0, sum_of_squares = 0;
    for (int c = threadIdx.x; c < size; c += blockDim.x) sum += x[c];
    float mean = block_sum(sum) / size;
    for (int c = threadIdx.x; c < size; c += blockDim.x) sum_of_squares += (x[c] - mean) * (x[c] - mean);
    float deviation = sqrtf(block_sum(sum_of_squares) / size + eps);
    for (int c = threadIdx.x; c < size; c += blockDim.x) put(y, row + c, (x[c] - mean) / deviation * weight[c] + bias[c], halves);
}

// Sets y (n, size) to the activation of x (n, size) or, `gated`, to that of the first half of x (n, 2 * size) times the second half.
// Grid (size / threads, n).
extern "C" __global__ void activation(const float* x, int size, int kind, int gated, void* y, int halves)
{
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= size) return;
    x += (i64)blockIdx.y * (gated ? 2 * size : size);
    float a = kind == IDENTITY ? x[c] : activate(x[c], kind);
    put(y, (i64)blockIdx.y * size + c, a * (gated ? x[size + c] : 1), halves);
}

// Sets row i of x (n, size) to row ids[i] of the table, plus row start + *position_delta + i of the table `positions` unless that
// is null. KIND_* says how their elements are stored.
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
                                 int start, const int* position_delta, int size, float* x)
{
    launch_dependents();
    for (int c = threadIdx.x; c < size; c += blockDim.x) {
        float value = element(table, kind, (i64)ids[blockIdx.x] * size + c);
        if (positions)
            value += element(positions, positions_kind, (i64)(start + *position_delta + blockIdx.x) * size + c);
        x[(i64)blockIdx.x * size + c] = value;
    }
}

// Tables (rows, half) of a rotation by position; the first token's is row *position_delta. half 0: no rotation.
struct Rope {
    const float *cos, *sin;
    int half;
    const int* position_delta;
};

// Heads (n_heads, n, head_dim), `stride` apart.
struct Heads {
    float* x;
    int stride;
};

// Queries (H, n, width), if not null, and keys and values (G, capacity, width) from token `first` on, all in halves.
struct HalfQKV {
    u16 *q, *k, *v;
    int width, capacity;
    Counter first;
};

// Weights of the norms of queries and of keys, or null.
struct HeadNorms {
    const float *q, *k;
    float eps;
};

// Splits the fused projection qkv (n, (H + 2 G) * D) of a token into heads, normalises queries and keys, and rotates them. q
// (unless it is null), k and v get them, queries times the scale; `halves` that are not null get them, too, with zeros in the
// channels from D on. Grid (n, H + 2 G).
extern "C" __global__ void __launch_bounds__(THREADS)
split_rope(const float* qkv, const Rope rope, Heads q, Heads k, Heads v, int n_heads, int n_kv_heads, int head_dim, float scale,
           const HeadNorms norms, const HalfQKV halves)
{
    int token = blockIdx.x, head = blockIdx.y, half = rope.half, width = halves.width;
    i64 table_row = half ? (i64)(token + *rope.position_delta) * half : 0;
    launch_dependents();
    grid_dependency_wait();
    bool is_query = head < n_heads, is_value = head >= n_heads + n_kv_heads, is_wanted = q.x || !is_query;
    int g = head - n_heads - (is_value ? n_kv_heads : 0);
    const float *x = qkv + ((i64)token * gridDim.y + head) * head_dim, *norm = is_query ? norms.q : norms.k;
    float* out = is_query ? q.x + (i64)head * q.stride : is_value ? v.x + (i64)g * v.stride : k.x + (i64)g * k.stride;
    u16* half_out = is_query ? halves.q : is_value ? halves.v : halves.k;
    if (half_out) half_out += ((is_query ? (i64)head * gridDim.x : (i64)g * halves.capacity + halves.first.now()) + token) * width;
    const float *cos = rope.cos + table_row, *sin = rope.sin + table_row;
    if (!is_query) scale = 1;
    float sum_of_squares = 0, rms = 1;
    bool normed = norm && !is_value;
    if (normed) {
        for (int c = threadIdx.x; c < head_dim; c += THREADS) sum_of_squares += x[c] * x[c];
        rms = sqrtf(block_sum(sum_of_squares) / head_dim + norms.eps);
    }
    for (int c = threadIdx.x; c < max_of(head_dim, width); c += THREADS) {
        bool is_there = c < head_dim, turns = !is_value && c < 2 * half;
        int other = c < half ? c + half : c - half;
        float a = is_there ? x[c] : 0, b = turns ? x[other] : 0;
        if (normed && is_there) a = a / rms * norm[c];
        if (normed && turns) b = b / rms * norm[other];
        if (turns) a = c < half ? a * cos[c] - b * sin[c] : a * cos[other] + b * sin[other];
        if (is_wanted && is_there) out[(i64)token * head_dim + c] = a * scale;
        if (half_out) half_out[c] = finite_half(a * scale);
    }
}

// Takes the softmax of rows, in place: of columns lo .. hi, or of those that limits (2, rows) give each row; 0 elsewhere. Grid (rows, G).
#define IN_FLIGHT 4  // columns that a thread reads before it writes them

extern "C" __global__ void __launch_bounds__(1024)
softmax(Scores scores, int columns, const int* limits, int lo, int hi)
{
    float* row = scores.row(blockIdx.y, blockIdx.x);
    if (limits) lo = limits[blockIdx.x], hi = limits[gridDim.x + blockIdx.x];
    float largest = MINUS_INFINITY, total = 0, x[IN_FLIGHT];
    for (int i = lo + threadIdx.x; i < hi; i += blockDim.x) largest = fmaxf(largest, row[i]);
    largest = block_max(largest);
    if (largest == MINUS_INFINITY) largest = 0;
    for (int i = lo + threadIdx.x; i < hi; i += blockDim.x) total += expf(row[i] - largest);
    total = block_sum(total);
    float factor = total > 0 ? 1 / total : 0;
    for (int first = threadIdx.x; first < columns; first += IN_FLIGHT * (int)blockDim.x) {
        UNROLL for (int k = 0; k < IN_FLIGHT; ++k) {
            int i = first + k * (int)blockDim.x;
            x[k] = i >= lo && i < hi ? row[i] : MINUS_INFINITY;
        }
        UNROLL for (int k = 0; k < IN_FLIGHT; ++k) {
            int i = first + k * (int)blockDim.x;
            if (i < columns) row[i] = expf(x[k] - largest) * factor;
        }
    }
}

// Adds the sum over the splits of partial (G, splits, row) to out (G, row), of n numbers in all.
extern "C" __global__ void add_partial(const float* partial, int splits, int row, int n, float* out)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float* from = partial + (i64)(i / row) * splits * row + i % row;
    float sum = 0;
    for (int k = 0; k < splits; ++k) sum += from[(i64)k * row];
    out[i] += sum;
}

// Sets out (rows, d) to attention over n sets of tokens, from attention over each: parts (n, rows, d), and softmaxes (n, rows, 2), the
// maximum of a set's scores and the sum of its weights. Grid (rows).
extern "C" __global__ void merge(const float* parts, const float* softmaxes, int n, int d, float* out)
{
    i64 row = blockIdx.x, rows = gridDim.x;
    float largest = MINUS_INFINITY, total = 0;
    for (int i = 0; i < n; ++i)
        if (softmaxes[(i * rows + row) * 2 + 1] > 0) largest = fmaxf(largest, softmaxes[(i * rows + row) * 2]);
    for (int i = 0; i < n; ++i) {
        const float* softmax = softmaxes + (i * rows + row) * 2;
        total += softmax[1] > 0 ? expf(softmax[0] - largest) * softmax[1] : 0;
    }
    float factor = total > 0 ? 1 / total : 0;
    for (int c = threadIdx.x; c < d; c += blockDim.x) {
        float sum = 0;
        for (int i = 0; i < n; ++i) {
            const float* softmax = softmaxes + (i * rows + row) * 2;
            if (softmax[1] > 0) sum += expf(softmax[0] - largest) * softmax[1] * factor * parts[(i * rows + row) * d + c];
        }
        out[row * d + c] = sum;
    }
}

// Sets what a captured step reads (`Driver.inputs`) to numbers that are in the host's memory, or to 0.
extern "C" __global__ void set_inputs(const int* from, int* inputs) { inputs[threadIdx.x] = from ? from[threadIdx.x] : 0; }
