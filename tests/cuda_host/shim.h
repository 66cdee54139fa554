// Runs CUDA kernels on the CPU, for tests: a block's threads are fibers that take turns at barriers and shuffles.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __constant__ static const
#define DYNAMIC_SHARED(type, name, size) static type name[size]
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };
static dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace fibers {
struct Fiber {
    ucontext_t context;  // where it starts; later switches are jumps, which take no system call
    jmp_buf place;
    char* stack = nullptr;
    bool running = false, started = false;
};
struct Warp {
    unsigned long long slots[2][32];
    int arrived = 0, round = 0, live = 0;
};
static std::vector<Fiber> all;
static std::vector<Warp> warps;
static jmp_buf scheduler;
static int current, live, at_barrier, barrier_round;
static bool progress, backwards;
static std::function<void()> body;
static const size_t STACK = 1 << 17;

inline void yield()
{
    if (_setjmp(all[current].place) == 0) _longjmp(scheduler, 1);
}
inline void resume(Fiber& fiber)
{
    if (_setjmp(scheduler) != 0) return;
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    setcontext(&fiber.context);
}
inline void entry()
{
    body();
    all[current].running = false;
    --live, --warps[current / 32].live;
    progress = true;
    yield();
}
// Waits until all that are alive have come.
inline void meet(int& arrived, int& round, const int& alive)
{
    int mine = round;
    ++arrived;
    while (round == mine) {
        if (arrived >= alive) {
            arrived = 0;
            ++round;
            progress = true;
            return;
        }
        yield();
    }
}
inline void run_block(int threads)
{
    if ((int)all.size() != threads) {
        for (auto& fiber : all) free(fiber.stack);
        all.assign(threads, {});
        for (auto& fiber : all) fiber.stack = (char*)malloc(STACK);
    }
    warps.assign((threads + 31) / 32, {});
    at_barrier = 0, live = threads;
    for (int i = 0; i < threads; ++i) {
        getcontext(&all[i].context);
        all[i].context.uc_stack.ss_sp = all[i].stack;
        all[i].context.uc_stack.ss_size = STACK;
        all[i].context.uc_link = nullptr;
        makecontext(&all[i].context, entry, 0);
        all[i].running = true, all[i].started = false;
        ++warps[i / 32].live;
    }
    for (bool any = true; any;) {
        any = progress = false;
        for (int k = 0; k < threads; ++k) {
            current = backwards ? threads - 1 - k : k;
            if (!all[current].running) continue;
            any = true;
            threadIdx.x = current;
            resume(all[current]);
        }
        if (any && !progress) {
            fprintf(stderr, "threads of a block wait for each other\n");
            abort();
        }
    }
}
inline void run(dim3 grid, int threads, bool reversed, std::function<void()> kernel)
{
    body = kernel;
    backwards = reversed;
    gridDim = grid;
    blockDim.x = threads;
    for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) run_block(threads);
}
}  // namespace fibers

inline void __syncthreads()
{
    fibers::meet(fibers::at_barrier, fibers::barrier_round, fibers::live);
}
inline void meet(int number, int threads)
{
    static int arrived[16], rounds[16];
    fibers::meet(arrived[number], rounds[number], threads);
}
template <class T> T __shfl_xor_sync(unsigned, T x, int lanes)
{
    int w = fibers::current / 32, lane = fibers::current % 32;
    fibers::Warp& warp = fibers::warps[w];
    int side = warp.round % 2;
    memcpy(&warp.slots[side][lane], &x, sizeof(T));
    fibers::meet(warp.arrived, warp.round, warp.live);
    T other;
    memcpy(&other, &warp.slots[side][lane ^ lanes], sizeof(T));
    return other;
}
template <class T> T __shfl_sync(unsigned, T x, int from)
{
    int lane = fibers::current % 32;
    T result = x;
    for (int i = 1; i < 32; ++i) {
        T other = __shfl_xor_sync(0, x, i);
        if ((lane ^ i) == from) result = other;
    }
    return result;
}
inline unsigned __ballot_sync(unsigned, int predicate)
{
    unsigned bits = (predicate != 0) << fibers::current % 32;
    for (int i = 16; i > 0; i /= 2) bits |= __shfl_xor_sync(0, bits, i);
    return bits;
}
inline void __syncwarp(unsigned = 0) { __shfl_xor_sync(0, 0, 0); }
inline void __threadfence() {}
inline unsigned atomicInc(unsigned* at, unsigned most)
{
    unsigned old = *at;
    *at = old >= most ? 0 : old + 1;
    return old;
}
inline unsigned atomicOr(unsigned* at, unsigned bits)
{
    unsigned old = *at;
    *at |= bits;
    return old;
}
template <class T> T __ldcg(const T* at) { return *at; }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
template <class To, class From> To same_bits(From x)
{
    To y;
    memcpy(&y, &x, sizeof(y));
    return y;
}
inline float __uint_as_float(unsigned x) { return same_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }
inline float __int_as_float(int x) { return same_bits<float>(x); }
inline float __expf(float x) { return expf(x); }
inline int __float2int_rn(float x) { return (int)nearbyintf(x); }

inline float half_to_float(unsigned short bits) { return (float)same_bits<_Float16>(bits); }
inline unsigned short float_to_half(float x) { return same_bits<unsigned short>((_Float16)x); }
inline float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
inline unsigned dp4a(unsigned a, unsigned b, unsigned sum)
{
    for (int i = 0; i < 32; i += 8) sum += (a >> i & 255) * (b >> i & 255);
    return sum;
}

inline unsigned short finite_half(float x) { return float_to_half(x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x); }
inline unsigned two_halves(float a, float b) { return float_to_half(a) | (unsigned)float_to_half(b) << 16; }
inline void grid_dependency_wait() {}
inline void launch_dependents() {}
inline float power_of_two(float x) { return exp2f(x); }

// What the lanes of a warp show each other, until all have looked.
template <class T> struct Shown {
    const T* lanes[32];
    Shown(const T& mine)
    {
        fibers::Warp& warp = fibers::warps[fibers::current / 32];
        int side = warp.round % 2;
        warp.slots[side][fibers::current % 32] = (unsigned long long)&mine;
        fibers::meet(warp.arrived, warp.round, warp.live);
        for (int i = 0; i < 32; ++i) lanes[i] = (const T*)warp.slots[side][i];
    }
    ~Shown() { __syncwarp(); }
};
inline float low_half(unsigned x) { return half_to_float((unsigned short)x); }
inline float high_half(unsigned x) { return half_to_float((unsigned short)(x >> 16)); }

// As ptx.cu says.
struct Factors { unsigned a[4], b[2]; };
inline void mma_f16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1)
{
    Factors mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    Shown<Factors> all(mine);
    int lane = fibers::current % 32;
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 16; ++k) {
            const Factors& left = *all.lanes[lane / 4 * 4 + k % 8 / 2];
            const Factors& right = *all.lanes[(lane % 4 * 2 + i % 2) * 4 + k % 8 / 2];
            unsigned x = left.a[i / 2 + k / 8 * 2], y = right.b[k / 8];
            c[i] += k % 2 ? high_half(x) * high_half(y) : low_half(x) * low_half(y);
        }
}
struct MaximumOrNaN {
    static float of(float a, float b) { return a != a || b != b ? NAN : a > b ? a : b; }
};
inline unsigned shared_address(const void*) { return 0; }
template <int OFFSET = 0> unsigned shared_word(const unsigned* array, unsigned at) { return array[(at + OFFSET) / 4]; }
template <class A, class B> void multiply_whole(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1)
{
    Factors mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    Shown<Factors> all(mine);
    int lane = fibers::current % 32;
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 32; ++k) {
            const Factors& left = *all.lanes[lane / 4 * 4 + k % 16 / 4];
            const Factors& right = *all.lanes[(lane % 4 * 2 + i % 2) * 4 + k % 16 / 4];
            c[i] += (int)(A)(left.a[i / 2 + k / 16 * 2] >> k % 4 * 8) * (B)(right.b[k / 16] >> k % 4 * 8);
        }
}
inline void mma_u8s8(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1)
{
    multiply_whole<unsigned char, signed char>(c, a, b0, b1);
}
inline void mma_s8s8(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1)
{
    multiply_whole<signed char, signed char>(c, a, b0, b1);
}
inline void mma_u8u8(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1)
{
    multiply_whole<unsigned char, unsigned char>(c, a, b0, b1);
}
inline void mma_and_popc(int (&c)[4], unsigned a0, unsigned a1, unsigned b)
{
    Factors mine = {{a0, a1, 0, 0}, {b, 0}};
    Shown<Factors> all(mine);
    int lane = fibers::current % 32;
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 4; ++k)
            c[i] += __builtin_popcount(all.lanes[lane / 4 * 4 + k]->a[i / 2] & all.lanes[(lane % 4 * 2 + i % 2) * 4 + k]->b[0]);
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned order)
{
    unsigned long long both = x | (unsigned long long)y << 32;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= (unsigned)(both >> (order >> 4 * i & 7) * 8 & 255) << 8 * i;
    return result;
}
inline unsigned prmt(unsigned x, unsigned y, unsigned order)
{
    unsigned picked = __byte_perm(x, y, order);
    for (int i = 0; i < 4; ++i)
        if (order >> 4 * i & 8) picked = picked & ~(255u << 8 * i) | (picked >> 8 * i & 128 ? 255u : 0u) << 8 * i;
    return picked;
}
inline void ldmatrix(unsigned (&x)[4], const unsigned short* row)
{
    Shown<const unsigned short*> all(row);
    int lane = fibers::current % 32;
    for (int m = 0; m < 4; ++m) memcpy(&x[m], *all.lanes[8 * m + lane / 4] + lane % 4 * 2, 4);
}
inline void ldmatrix_transposed(unsigned (&x)[4], const unsigned short* row)
{
    Shown<const unsigned short*> all(row);
    int lane = fibers::current % 32;
    for (int m = 0; m < 4; ++m) {
        const unsigned short *first = *all.lanes[8 * m + lane % 4 * 2], *second = *all.lanes[8 * m + lane % 4 * 2 + 1];
        x[m] = first[lane / 4] | (unsigned)second[lane / 4] << 16;
    }
}
inline void cp_async(void* to, const void* from, bool there)
{
    if (there) memcpy(to, from, 16);
    else memset(to, 0, 16);
}
inline void cp_async_commit() {}
template <int N> void cp_async_wait() {}
