// PTX instructions: conversions, a multiply-add that keeps denormals, dot products, tensor cores, asynchronous copies.

// Shared memory whose bytes the launch gives; `size` elements where all memory is the host's.
#define DYNAMIC_SHARED(type, name, size) extern __shared__ type name[]

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

// Returns a * b + c. CuPy compiles with -ftz=true; this keeps denormal operands.
__device__ __forceinline__ float multiply_add(float a, float b, float c)
{
    float x;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(x) : "f"(a), "f"(b), "f"(c));
    return x;
}

// Returns sum plus the four products of unsigned bytes. dp4a came with sm_61.
__device__ __forceinline__ u32 dp4a(u32 a, u32 b, u32 sum)
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

// Returns bytes of the words a and b, as the lowest four digits of `order` say: byte 0 .. 7, or 8 .. 15 for the sign of byte 0 .. 7 in all
// its bits.
__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 order)
{
    u32 x;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(order));
    return x;
}

// Returns where an array of shared memory lies there.
__device__ __forceinline__ u32 shared_address(const void* array) { return (u32)__cvta_generic_to_shared(array); }

// Returns the word of an array OFFSET bytes behind an address in shared memory.
template <int OFFSET = 0> __device__ __forceinline__ u32 shared_word(const u32* array, u32 at)
{
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1 + %2];" : "=r"(x) : "r"(at), "n"(OFFSET));
    return x;
}

// Waits until `threads` threads of a block, whole warps, have come to its barrier of this number, 0 to 15; 0 is __syncthreads's, too.
__device__ __forceinline__ void meet(int number, int threads) { asm volatile("bar.sync %0, %1;" :: "r"(number), "r"(threads) : "memory"); }

// For blocks of matrix products on tensor cores, from sm_75 on.
#if __CUDA_ARCH__ >= 750

// Adds a (16 x 16) times b (16 x 8), in halves, to c (16 x 8), in float32. Lane 4 i + j has, of a, rows i and i + 8 of columns
// 2 j, 2 j + 1, and the same of columns 8 further; of b rows 2 j, 2 j + 1 of column i, and of rows 8 further; of c rows i and
// i + 8 of columns 2 j, 2 j + 1.
__device__ __forceinline__ void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1)
{
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

// Loads four 8 x 8 matrices of halves from shared memory: lane 8 m + i gives the address of row i of matrix m; lane 4 i + j gets
// elements 2 j, 2 j + 1 of row i of matrix m in x[m], or of its column i (`transposed`).
__device__ __forceinline__ void ldmatrix(u32 (&x)[4], const u16* row)
{
    u32 at = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}

__device__ __forceinline__ void ldmatrix_transposed(u32 (&x)[4], const u16* row)
{
    u32 at = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}

// Begins to copy 16 bytes into shared memory, zeros if they do not exist; `cp_async_wait<N>` waits for all copies before the latest
// N `cp_async_commit`. Before sm_80 the copy is done at once.
__device__ __forceinline__ void cp_async(void* to, const void* from, bool exists)
{
#if __CUDA_ARCH__ >= 800
    u32 at = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(at), "l"(from), "r"(exists ? 16 : 0) : "memory");
#else
    uint4 zeros = {0, 0, 0, 0};
    *(uint4*)to = exists ? *(const uint4*)from : zeros;
#endif
}

__device__ __forceinline__ void cp_async_commit()
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int N> __device__ __forceinline__ void cp_async_wait()
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
#endif
}
#endif

// The larger of two numbers, NaN if one is, from sm_80 on; fmaxf would drop it.
#if __CUDA_ARCH__ >= 800
struct MaximumOrNaN {
    static __device__ __forceinline__ float of(float a, float b)
    {
        float x;
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
        return x;
    }
};
#endif

// Products of integers on tensor cores, from sm_80 on. Lane 4 i + j has, of a, word j of rows i and i + 8 and (of 16 x 32 bytes)
// both again 4 words further; of b the same of column i; of c rows i and i + 8 of columns 2 j, 2 j + 1.
#if __CUDA_ARCH__ >= 800
#define EDGEKV_INTEGER_MMA(types)                                                                                        \
    asm("mma.sync.aligned.m16n8k32.row.col.s32." types ".s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"      \
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])                                                                 \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

// Adds a (16 x 32), bytes from 0 to 255, times b (32 x 8), bytes from -128 to 127, to c (16 x 8).
__device__ __forceinline__ void mma_u8s8(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { EDGEKV_INTEGER_MMA("u8.s8"); }

// Adds a times b, both bytes from -128 to 127, to c.
__device__ __forceinline__ void mma_s8s8(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { EDGEKV_INTEGER_MMA("s8.s8"); }

// Adds a times b, both bytes from 0 to 255, to c.
__device__ __forceinline__ void mma_u8u8(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { EDGEKV_INTEGER_MMA("u8.u8"); }

// Adds to c (16 x 8) how many bits are set both in a row of a (16 x 128) and in a column of b (128 x 8).
__device__ __forceinline__ void mma_and_popc(int (&c)[4], u32 a0, u32 a1, u32 b)
{
    asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
}
#endif

// A kernel that is launched early (Launch.early) may first do what needs no results of earlier launches, then has to wait for them,
// and lets the next kernel begin when all its own blocks run. From sm_90 on.
__device__ __forceinline__ void grid_dependency_wait()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void launch_dependents()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns 2 ** x, to about 2 units in the last place.
__device__ __forceinline__ float power_of_two(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Returns the nearest finite half.
__device__ __forceinline__ u16 finite_half(float x) { return float_to_half(x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x); }

// Returns two numbers as halves in a word, the first in its lower bits.
__device__ __forceinline__ u32 two_halves(float a, float b) { return float_to_half(a) | (u32)float_to_half(b) << 16; }
