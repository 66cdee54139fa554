"""The CUDA path, through CuPy: `--device cuda` decodes on the GPU with the same models, caches and schemes.

Design. Nothing above the kernels knows where arrays are:

1. Caches and codecs are NumPy code that follows its arguments. NumPy's dispatch (NEP 13, 18, 35) sends operators
   and functions to CuPy when the arguments are CuPy's; temporaries are made with `np.empty_like(x, shape=...)`,
   constants brought over with `np.asarray(constant, like=array)`. What that leaves open is in
   `edgekv.kernels.memory`: `contiguous`, `to_host`, and `Memory`, where stores and scratch come from. A cache
   takes its arrays from `Workspace.memory`, which is `edgekv.kernels.aligned` on a CPU and a `Driver` here.
2. Kernels are one object, `CudaKernels`, with the functions of `edgekv.kernels.contract`; each family is a Python
   file with its .cu file beside it. Ranges and counts (int64) stay on the host, and other small operands may:
   they are uploaded once per value.
3. A score buffer is opaque to caches (`Workspace.scores`). For a single token it is a `Scores` that only
   remembers what is asked: once each span of tokens has its values, all of it is one launch, with a running
   softmax and no scores in memory (`attend.cu`). A kernel that wants the probabilities themselves, as bitplane's
   second stage, gets them after all. Prompts, and codecs without a part in that kernel, take the three steps of
   the specification.
4. The decoder is `Decoder` with device weights, rope tables and exact attention (cuBLAS) in their places. One
   number per token comes back to the host: the chosen token, from `edgekv.session.cuda_sampling`.
5. A step is recorded once as a CUDA graph and replayed while a cache does nothing but append
   (`KVCache.steady_tokens`), with positions moved by a number on the device (`edgekv.models.cuda_graph`).
6. The device itself is a `Driver` (`edgekv.kernels.cuda.program`): CuPy's here, a CPU that runs the same .cu files
   in tests.

A .cu file is C++14 without headers, for sm_53 (Maxwell) up: no tensor cores, no bfloat16; the byte dot product of
sm_61 has a substitute. It is compiled by NVRTC at first use for the shapes at hand, and cached by CuPy
(CUPY_CACHE_DIR, ~/.cupy/kernel_cache). Importing edgekv never imports CuPy.
"""
