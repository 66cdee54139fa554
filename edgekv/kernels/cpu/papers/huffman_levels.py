"""Error-bounded levels: codes of a fixed relative step within each channel of a block or each token."""

import numpy as np

from edgekv.kernels.contract.attention import LARGEST_F16
from edgekv.kernels.cpu.compile import Args, Scalar, jit
from edgekv.kernels.cpu.launch import run
from edgekv.kernels.cpu.scalar import (
    as_float,
    clamp,
    float_to_half,
    get,
    maximum,
    minimum,
    put,
    round_to_even,
    round_up_to_half,
)
from edgekv.types import F32, U8, U16

QUANTISE_WORK = 4  # of an element, in multiply-adds
ZERO, ONE = np.array([0, 1], np.float32)


def quantize_channels(
    x: F32, relative_step: float, levels: int, block: int, codes: U8, low: U16, step: U16, b0: int
) -> None:
    n_blocks = x.shape[1] // block
    ends = np.empty((len(x) * n_blocks, 2, x.shape[2]), np.float32)
    scale = np.float32(relative_step), np.float32(levels - 1)
    args = np.ascontiguousarray(x), *scale, block, codes, low, step, b0, ends
    run(_quantize_blocks, len(x) * n_blocks, QUANTISE_WORK * x.size, args)


def quantize_tokens(x: F32, relative_step: float, levels: int, codes: U8, low: U16, step: U16, t0: int) -> None:
    scale = np.float32(relative_step), np.float32(levels - 1)
    args = np.ascontiguousarray(x), *scale, codes, low, step, t0
    run(_quantize_tokens, x.shape[0] * x.shape[1], QUANTISE_WORK * x.size, args)


@jit
def _quantize_blocks(first: int, last: int, args: Args) -> None:
    x, relative_step, highest, block, codes, low, step, b0, ends = args
    (_, _, head_dim), n_blocks = x.shape, x.shape[1] // block
    x, codes, ends = x.reshape(-1), codes.reshape(-1), ends.reshape(-1)
    for item in range(first, last):
        g, b = item // n_blocks, b0 + item % n_blocks
        start, least = item * block * head_dim, item * 2 * head_dim
        largest = least + head_dim
        for d in range(head_dim):
            put(ends, least + d, get(x, start + d))
            put(ends, largest + d, get(x, start + d))
        for t in range(1, block):
            for d in range(head_dim):
                y = get(x, start + t * head_dim + d)
                put(ends, least + d, minimum(get(ends, least + d), y))
                put(ends, largest + d, maximum(get(ends, largest + d), y))
        for d in range(head_dim):
            low[g, b, d], step[g, b, d] = _scale(get(ends, least + d), get(ends, largest + d), relative_step)
            put(ends, least + d, as_float(low[g, b, d]))
            put(ends, largest + d, _divisor(step[g, b, d]))
        for t in range(block):
            i = start + t * head_dim
            for d in range(head_dim):
                lo, size = get(ends, least + d), get(ends, largest + d)
                put(codes, i + d, _level(get(x, i + d), lo, size, highest))


@jit
def _quantize_tokens(first: int, last: int, args: Args) -> None:
    x, relative_step, highest, codes, low, step, t0 = args
    _, n_tokens, head_dim = x.shape
    x, codes = x.reshape(-1), codes.reshape(-1)
    for item in range(first, last):
        g, t, start = item // n_tokens, t0 + item % n_tokens, item * head_dim
        lo = hi = get(x, start)
        for d in range(1, head_dim):
            lo, hi = minimum(lo, get(x, start + d)), maximum(hi, get(x, start + d))
        low[g, t], step[g, t] = _scale(lo, hi, relative_step)
        lo, size = as_float(low[g, t]), _divisor(step[g, t])
        for d in range(head_dim):
            put(codes, start + d, _level(get(x, start + d), lo, size, highest))


@jit
def _scale(least: Scalar, largest: Scalar, relative_step: Scalar) -> tuple[Scalar, Scalar]:
    """Bits of low and step."""
    low = float_to_half(minimum(maximum(least, -LARGEST_F16), LARGEST_F16) + ZERO)  # no -0
    return low, round_up_to_half(maximum(largest - as_float(low), ZERO) * relative_step)


@jit
def _divisor(step: Scalar) -> Scalar:
    size = as_float(step)
    return size if size > ZERO else ONE


@jit
def _level(x: Scalar, low: Scalar, size: Scalar, highest: Scalar) -> Scalar:
    level = round_to_even((x - low) / size)
    return np.uint8(np.int32(clamp(level, ZERO, highest)))
