"""CUDA kernels of the papers' schemes and the baselines."""
