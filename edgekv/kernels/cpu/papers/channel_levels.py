"""Uniform levels between ends of each channel's own: queries take the steps up before, sums after.

q . (low + step * c) = q . low + (q * step) . c; sum(p * (low + step * c)) = low * sum(p) + step * sum(p * c).
"""

from typing import Any

import numpy as np

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.cpu.half import as_float
from edgekv.kernels.cpu.jit import Scalar, jit
from edgekv.kernels.cpu.loops import (
    Loops,
    add_loop,
    address_of,
    chars,
    floats,
    halves,
    numbers,
    prepare_loop,
    score_loop,
)
from edgekv.kernels.cpu.papers.byte_rows import ROWS, add_codes, score_codes
from edgekv.kernels.cpu.papers.visual import BYTE_BITS, unpack
from edgekv.kernels.cpu.scalar import get, maximum, minimum, put
from edgekv.types import F32

ZERO, ONE = np.array([0, 1], np.float32)


@prepare_loop
def _prepare(store: int, q: int, rows: int, g: int, prepared: int) -> None:
    """Each row's q * step, behind all of them what its scores begin at, q . low; then room for `_pull`."""
    x = numbers(store)
    head_dim, low, step = get(x, 0), halves(get(x, 4)), halves(get(x, 5))
    queries, to = floats(q), floats(prepared)
    for m in range(rows):
        start = ZERO
        for d in range(head_dim):
            y = get(queries, m * head_dim + d)
            start += y * as_float(get(low, g * head_dim + d))
            put(to, m * head_dim + d, y * as_float(get(step, g * head_dim + d)))
        put(to, rows * head_dim + m, start)
    pull = get(floats(get(x, 6)), 0)
    if pull > ZERO:
        for m in range(rows):
            _pull(store, g, prepared, rows, m, pull)


@jit
def _pull(store: int, g: int, prepared: int, rows: int, m: int, pull: Scalar) -> None:
    """Changes row m so that the least of its scores with all tokens stays and the largest loses ``pull``."""
    x = numbers(store)
    head_dim, n_tokens = get(x, 0), get(x, 2)
    block = rows * (head_dim + 1)
    to, codes = floats(prepared), chars(prepared + 4 * (block + BLOCK))
    least, largest = np.float32(np.inf), np.float32(-np.inf)
    for t in range(0, n_tokens, BLOCK):
        few = min(BLOCK, n_tokens - t)
        _unpack_block(store, g, t, few, codes)
        score_codes(to, m * head_dim, 1, codes, 0, few, head_dim, to, block, BLOCK)
        for i in range(block, block + few):
            least, largest = minimum(least, get(to, i)), maximum(largest, get(to, i))
    if largest > least:
        start, slope = get(to, rows * head_dim + m), maximum(ONE - pull / (largest - least), ZERO)
        put(to, rows * head_dim + m, start + (ONE - slope) * least)
        for d in range(m * head_dim, (m + 1) * head_dim):
            put(to, d, slope * get(to, d))


@score_loop
def _score(store: int, q: int, rows: int, g: int, t: int, n: int, s: int, gap: int, scratch: int) -> None:
    head_dim = get(numbers(store), 0)
    queries, to, codes = floats(q), floats(s), chars(scratch)
    for i in range(0, n, BLOCK):
        few = min(BLOCK, n - i)
        _unpack_block(store, g, t + i, few, codes)
        score_codes(queries, 0, rows, codes, 0, few, head_dim, to, i, gap)
        for m in range(rows):
            start = get(queries, rows * head_dim + m)
            for j in range(m * gap + i, m * gap + i + few):
                put(to, j, get(to, j) + start)


@add_loop
def _add(store: int, p: int, gap: int, rows: int, g: int, t: int, n: int, out: int, scratch: int) -> None:
    x = numbers(store)
    head_dim, low, step = get(x, 0), halves(get(x, 4)), halves(get(x, 5))
    chances, to, weights = floats(p), floats(out), floats(scratch)
    sums, codes = floats(scratch + 4 * ROWS * BLOCK), chars(scratch + 4 * ROWS * (BLOCK + head_dim))
    for i in range(0, n, BLOCK):
        few = min(BLOCK, n - i)
        _unpack_block(store, g, t + i, few, codes)
        for m in range(0, rows, ROWS):
            n_rows = min(ROWS, rows - m)
            for j in range(n_rows * head_dim):
                put(sums, j, ZERO)
            for r in range(n_rows):
                for j in range(few):
                    put(weights, r * BLOCK + j, get(chances, (m + r) * gap + i + j))
            add_codes(weights, 0, n_rows, codes, 0, few, head_dim, sums, 0)
            for r in range(n_rows):
                total = _sum(weights, r * BLOCK, few)
                for d in range(head_dim):
                    k, j = g * head_dim + d, (m + r) * head_dim + d
                    change = as_float(get(low, k)) * total + as_float(get(step, k)) * get(sums, r * head_dim + d)
                    put(to, j, get(to, j) + change)


@jit
def _sum(x: F32, start: int, n: int) -> Scalar:
    total = ZERO
    for i in range(start, start + n):
        total += get(x, i)
    return total


@jit
def _unpack_block(store: int, g: int, t: int, n: int, codes: Any) -> None:
    x = numbers(store)
    head_dim, planes, capacity, n_bits = get(x, 0), get(x, 1), get(x, 2), get(x, 3)
    n_bytes = (head_dim + BYTE_BITS - 1) // BYTE_BITS
    unpack(chars(planes), (g * capacity + t) * n_bits * n_bytes, n_bits, n_bytes, n, head_dim, codes)


def _store(codec: Any) -> tuple[int, ...]:
    planes, low, step = (codec.arrays[name] for name in ("planes", "low", "step"))
    ends = address_of(low), address_of(step), address_of(codec.pull)
    return codec.head_dim, address_of(planes), *planes.shape[1:3], *ends


LOOPS = {
    "channel_levels": Loops(
        _store,
        score=_score,
        add=_add,
        prepare=_prepare,
        prepared=lambda codec, rows: 4 * (rows * (codec.head_dim + 1) + BLOCK) + BLOCK * codec.head_dim,
        scratch=lambda codec, rows: BLOCK * codec.head_dim + 4 * ROWS * (BLOCK + codec.head_dim),
    )
}
