// What only a GPU can say: conversions, a multiply-add that keeps denormals, a dot product of bytes.

__device__ __forceinline__ float half_to_float(u16 bits)
{
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

__device__ __forceinline__ u16 float_to_half(float x)
{
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// a * b + c. CuPy compiles with -ftz=true; this keeps denormal operands.
__device__ __forceinline__ float multiply_add(float a, float b, float c)
{
    float x;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(x) : "f"(a), "f"(b), "f"(c));
    return x;
}

// sum + the four products of unsigned bytes. dp4a came with sm_61.
__device__ __forceinline__ u32 dot_bytes(u32 a, u32 b, u32 sum)
{
#if __CUDA_ARCH__ >= 610
    u32 x;
    asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(sum));
    return x;
#else
    for (int i = 0; i < 32; i += 8)
        sum += (a >> i & 255) * (b >> i & 255);
    return sum;
#endif
}
