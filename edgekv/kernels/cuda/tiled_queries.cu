// What the warps of a block share in tiled_planes.cu: the queries, which are rotated and rounded to whole numbers here, and
// what each warp finds; and the output, which is rotated back.

#define WIDE (HEAD_DIM / 32)              // columns of 8 channels, words of centres, times 32 channels: of a lane
#define TOGETHER (ROWS <= 2)              // whether the two tiles' values are summed at once
#define SETS divide_up(ROWS, 4)           // of 8 columns
#define SLOTS (VALUE_BITS > 2 ? 2 : 1)    // words of values and channel that a lane reads of a tile
#define ROWS_TURNED (2 * THREADS / HEAD_DIM)
#define LARGEST 32639                     // 127 * 256 + 127

struct TiledShared {
    alignas(16) u8 digits[ROWS][2][HEAD_DIM];  // of the rotated queries, high ones first
    alignas(16) u8 whole[ROWS][HEAD_DIM];      // twice the queries' whole numbers
    alignas(16) u32 weights[WARPS][ROWS][2][TILE / 4];
    float units[WARPS][ROWS][2];         // what a weight of 1 stands for
    float step[ROWS], all[ROWS];         // what a number of 1 stands for, and the sum of the numbers
    float half_unit[ROWS];               // half of what a digit of 1 stands for
    int offset[ROWS];                    // twice what the codes' middle adds, in digits
    float peaks[WARPS][ROWS], totals[WARPS][ROWS], offsets[WARPS][ROWS];
    float turned[ROWS_TURNED][2][HEAD_DIM];
    float parts[WARPS][ROWS][HEAD_DIM];
};

// The Walsh-Hadamard transform of ROWS_TURNED rows, pairs HEAD_DIM / 2 apart in every pass; returns on which side they are.
__device__ int turn_rows(float (*x)[2][HEAD_DIM])
{
    int side = 0, slot = threadIdx.x / (HEAD_DIM / 2), i = threadIdx.x % (HEAD_DIM / 2);
    for (int n = 1; n < HEAD_DIM; n *= 2, side ^= 1) {
        __syncthreads();
        float a = x[slot][side][i], b = x[slot][side][i + HEAD_DIM / 2];
        x[slot][side ^ 1][2 * i] = a + b;
        x[slot][side ^ 1][2 * i + 1] = a - b;
    }
    __syncthreads();
    return side;
}

// A row of rotated queries, by a warp, in whole numbers and in digits.
__device__ void round_row(TiledShared& shared, const float* from, int m, float key_scale)
{
    int lane = threadIdx.x % 32;
    bool there = 4 * lane < HEAD_DIM;
    float x[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) x[k] = there ? from[4 * lane + k] * TURN_FACTOR : 0;
    float size = lane_max(fabsf(x[0]) + fabsf(x[1]) + fabsf(x[2]) + fabsf(x[3])) / LARGEST_FOUR;
    float divisor = size == 0 ? 1 : size;
    float most = lane_max(fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3]))));
    float inverse = most > 1e-30f ? LARGEST / most : 0, sum = 0;
    u32 whole = 0, high = 0, low = 0, digits = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        float number = floorf(x[k] / divisor) + 0.5f;
        int digit = __float2int_rn(x[k] * inverse), upper = digit + 128 >> 8;
        sum += there ? number : 0, digits += (u32)digit;
        whole |= ((u32)(int)(2 * number) & 255) << 8 * k;
        high |= ((u32)upper & 255) << 8 * k, low |= ((u32)(digit - 256 * upper) & 255) << 8 * k;
    }
    sum = lane_sum(sum), digits = lane_sum_u32(digits);
    if (there) {
        ((u32*)shared.whole[m])[lane] = whole;
        ((u32*)shared.digits[m][0])[lane] = high, ((u32*)shared.digits[m][1])[lane] = low;
    }
    if (lane == 0) {
        shared.step[m] = size * key_scale, shared.all[m] = sum;
        shared.half_unit[m] = most * (0.5f / LARGEST), shared.offset[m] = -15 * (int)digits;
    }
}

// x (ROWS, HEAD_DIM) in shared memory, rotated back, added to out.
__device__ void turn_back(TiledShared& shared, const float (*x)[HEAD_DIM], const float* flips, float* out)
{
    for (int base = 0; base < ROWS; base += ROWS_TURNED) {
        for (int k = threadIdx.x; k < ROWS_TURNED * HEAD_DIM; k += THREADS)
            shared.turned[k / HEAD_DIM][0][k % HEAD_DIM] = base + k / HEAD_DIM < ROWS ? x[base + k / HEAD_DIM][k % HEAD_DIM] : 0;
        int side = turn_rows(shared.turned);
        for (int k = threadIdx.x; k < least(ROWS_TURNED, ROWS - base) * HEAD_DIM; k += THREADS) {
            int c = k % HEAD_DIM;
            out[base * HEAD_DIM + k] += shared.turned[k / HEAD_DIM][side][c] * TURN_FACTOR * flips[c];
        }
        __syncthreads();
    }
}
