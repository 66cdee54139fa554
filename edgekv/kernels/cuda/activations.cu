// The activations by the numbers that edgekv.linear.cuda_weights.ACTIVATIONS gives them.
#define SILU 0
#define GELU 1
#define GELU_TANH 2
#define RELU 3

__device__ __forceinline__ float activate(float x, int kind)
{
    if (kind == SILU) return x / (1 + expf(-x));
    if (kind == GELU) return 0.5f * x * (1 + erff(x * 0.70710678f));
    if (kind == GELU_TANH) return 0.5f * x * (1 + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
    return fmaxf(x, 0);
}
