// How encoders choose scales, to the bit as edgekv.kernels.reference does.

#define LARGEST_HALF 65504.0f

// The smallest float16 not below x >= 0, or the largest.
__device__ __forceinline__ u16 half_above(float x)
{
    x = fminf(x, LARGEST_HALF);
    u16 half = float_to_half(x);
    return half + (half_to_float(half) < x);
}

// The nearest finite float16 of x >= 0.
__device__ __forceinline__ u16 half_of(double x) { return float_to_half((float)fmin(x, 65504.0)); }

// The least of a range of numbers as float16; no -0.
__device__ __forceinline__ u16 low_end(float least)
{
    return float_to_half(fminf(fmaxf(least, -LARGEST_HALF), LARGEST_HALF) + 0.0f);
}

// The distance of levels from low to the largest of the range.
__device__ __forceinline__ u16 level_step(float largest, u16 low, float top)
{
    return half_above(fmaxf(largest - half_to_float(low), 0) / top);
}

// The number of the level next to x, halves to even.
__device__ __forceinline__ u8 level_of(float x, u16 low, u16 step, int top)
{
    float size = half_to_float(step);
    float level = rintf((x - half_to_float(low)) / (size == 0 ? 1 : size));
    return (u8)fminf(fmaxf(level, 0), (float)top);
}

__device__ __forceinline__ double lane_sum_double(double x)
{
    for (int i = 16; i > 0; i /= 2)
        x += __shfl_xor_sync(EVERY_LANE, x, i);
    return x;
}
