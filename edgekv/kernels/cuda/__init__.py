"""The CUDA path, through CuPy: `--device cuda` decodes on the GPU with the same models, caches and schemes.

Nothing above the kernels knows where arrays are:

1. Caches and codecs are NumPy code that follows its arguments: NumPy's dispatch (NEP 13, 18, 35) sends operators
   and functions to CuPy when the arguments are CuPy's. What that leaves open is in `edgekv.kernels.arrays`. Caches
   take arrays from `Workspace.memory`: `edgekv.kernels.arrays` on a CPU, a `Driver` (driver.py) here.
2. Kernels are one object, `CudaKernels` (kernels.py). What runs is a `Launch`: a kernel of a `Program`, which is
   .cu files joined, and its grid. The driver is CuPy's, or in tests a CPU that runs the same files.
3. A codec's file has its `CudaCodec` (kernels.py): the C++ type that reads its arrays as rows (rows.cu), and
   what that needs of the queries. For a single token `attend` is one launch: a pair of codecs and the exact tokens
   beside it, with a running softmax and no scores in memory (attend.cu). Prompts, probabilities that are asked for
   and tokens that stand anywhere take a buffer of scores (ranges.cu).
4. The decoder is `Decoder` with device weights, rope tables and exact attention (`edgekv.engine.cuda`,
   `edgekv.weights.cuda`); prompts go through tensor cores where there are some. One number a token comes back to
   the host: the chosen token.
5. A step is captured once as a CUDA graph and replayed while steps differ in counters alone
   (`edgekv.engine.cuda`), which kernels find on the device (`Counter`).

A .cu file is C++14 without headers, for sm_53 (Maxwell) up (prefill_attention.cu: sm_75; tiled.cu and
tiled_linear.cu: sm_80). It is compiled by NVRTC at first use for the shapes at hand, cached by CuPy
(CUPY_CACHE_DIR, ~/.cupy/kernel_cache). Importing edgekv never imports CuPy.
"""
