"""What a prompt's kernels take, beside PyTorch's, for tools/gpu_check.py."""

from __future__ import annotations

from collections.abc import Iterator

import cupy
import numpy as np
from gpu_measure import HEAD_DIM, HEADS, Gpu, torch_seconds

from edgekv.kernels.cuda.matvec import linear_program
from edgekv.kernels.cuda.program import Launch

SHAPE = 4096, 11008  # of a matrix: rows, columns


def attention(gpu: Gpu, n: int) -> tuple[float, float]:
    """(seconds of a layer's attention over n tokens, its floating-point operations)."""
    q, k, v = ((gpu.normal(HEADS, n, HEAD_DIM) * 0.3).astype(np.float16) for _ in range(3))
    out = cupy.empty((n, HEADS * HEAD_DIM), np.float16)
    seconds = gpu.seconds(lambda: gpu.kernels.attend_prompt(q, k, v, 0, None, out))
    return seconds, 2 * HEADS * HEAD_DIM * n * n


def torch_attention(n: int) -> float:
    """Seconds of PyTorch's causal attention on the same shape."""
    import torch

    q, k, v = (torch.randn(1, HEADS, n, HEAD_DIM, dtype=torch.float16, device="cuda") for _ in range(3))
    return torch_seconds(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


def products(gpu: Gpu, n: int) -> Iterator[tuple[str, float, int]]:
    """(what, seconds, operations or bytes) of one matrix: widening int4 codes, and the product of halves."""
    rows, columns = SHAPE
    codes = gpu.rng.integers(0, 256, (rows, columns // 128, 64), dtype=np.uint8)
    scales, half = cupy.full((rows, columns // 128), 0.01, np.float32), cupy.empty(SHAPE, np.float16)
    launch = Launch(linear_program(4, 128), "widen_to_half", (-(-columns // 2048), rows), 256)
    seconds = gpu.seconds(lambda: gpu.driver.launch(launch, codes, scales, columns, columns // 128, half))
    yield "int4 weights to halves", seconds, codes.nbytes + scales.nbytes + half.nbytes
    x, y = gpu.normal(n, columns).astype(np.float16), cupy.empty((n, rows), np.float32)
    yield (
        "product of halves",
        gpu.seconds(lambda: gpu.driver.multiply_halves(x, half, y, False)),
        2 * n * half.size,
    )
