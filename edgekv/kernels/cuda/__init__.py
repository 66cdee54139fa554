"""The CUDA path, through CuPy: `--device cuda` decodes on the GPU with the same models, caches and schemes.

Design. Nothing above the kernels knows where arrays are:

1. Caches and codecs are NumPy code that follows its arguments. NumPy's dispatch (NEP 13, 18, 35) sends operators
   and functions to CuPy when the arguments are CuPy's; temporaries are made with `np.empty_like(x, shape=...)`,
   constants brought over with `np.asarray(constant, like=array)`. What that leaves open is in
   `edgekv.kernels.arrays`: `contiguous`, `to_host`, and `Memory`, where stores and scratch come from. A cache
   takes its arrays from `Workspace.memory`, which is `edgekv.kernels.arrays` on a CPU and a `Driver` here.
2. Kernels are one object, `CudaKernels`, with the functions of `edgekv.kernels.contract`. What runs is a `Launch`:
   a kernel of a `Program`, and its grid.
3. A file for each kind of codec, which its class names, has its `Loops`: the C++ type that reads its arrays and
   what that needs of the queries; a scheme whose kinds are there runs (`KVCache.kinds`). For a single token
   `attend` is one launch: a pair of codecs and the exact tokens beside it, with a running softmax and no scores in
   memory (attend.cu). Several pairs, as of `steps`, are a launch each, merged by the sums of their weights.
   Prompts, probabilities that are asked for and tokens that stand anywhere take a buffer of scores, all in
   attend.py.
4. The decoder is `Decoder` with device weights, rope tables and exact attention in their places
   (`edgekv.engine.cuda`); prompts go through tensor cores where there are some (`edgekv.engine.cuda`,
   `edgekv.weights.cuda`). One number a token comes back to the host: the chosen token, from
   `edgekv.engine.sampling`.
5. A step is recorded once as a CUDA graph and replayed while steps differ in counters alone (`KVCache.is_steady`),
   which kernels find on the device (`edgekv.kernels.cuda.counter`, `edgekv.engine.cuda_graph`).
6. The device itself is a `Driver` (`edgekv.kernels.cuda.program`): CuPy's here, a CPU that runs the same .cu files
   in tests.

A .cu file is C++14 without headers, for sm_53 (Maxwell) up (prompt_attention.cu: sm_75): no bfloat16; the byte
dot product of sm_61 has a substitute. It is compiled by NVRTC at first use for the shapes at hand, cached by CuPy
(CUPY_CACHE_DIR, ~/.cupy/kernel_cache). Importing edgekv never imports CuPy.
"""
