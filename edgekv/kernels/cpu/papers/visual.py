"""Uniform levels between given ends, in bit planes, unpacked a block at a time into the core's own cache."""

from typing import Any

import numpy as np

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.cpu import simd
from edgekv.kernels.cpu.codes import prepared_bytes, with_totals
from edgekv.kernels.cpu.half import as_float
from edgekv.kernels.cpu.jit import Args, Scalar, fast_jit, jit
from edgekv.kernels.cpu.launch import run
from edgekv.kernels.cpu.loops import Loops, add_loop, address_of, chars, floats, halves, numbers, score_loop
from edgekv.kernels.cpu.papers.bits import put_bits, shift_in_bits
from edgekv.kernels.cpu.papers.byte_rows import ROWS, add_codes, add_constant, score_codes
from edgekv.kernels.cpu.rounding import round_to_even
from edgekv.kernels.cpu.scalar import clamp, get, put
from edgekv.types import F32, U8, U16

LANES = simd.LANES
ENCODE_WORK = 4  # of an element, in multiply-adds
BYTE_BITS = 8
ZERO = np.float32(0)


def encode_levels(x: F32, low: U16, step: U16, planes: U8, t0: int) -> None:
    args = np.ascontiguousarray(x), low, step, planes, t0
    run(_encode_tokens, x.shape[0] * x.shape[1], ENCODE_WORK * x.size, args)


@jit
def _encode_tokens(first: int, last: int, args: Args) -> None:
    x, low, step, planes, t0 = args
    (_, n_tokens, head_dim), (n_bits, n_bytes) = x.shape, planes.shape[2:]
    x = x.reshape(-1)
    highest = np.float32((1 << n_bits) - 1)
    for item in range(first, last):
        g, i = item // n_tokens, item % n_tokens
        lo, size = _ends(low, step, g, t0 + i)
        token = planes[g, t0 + i].reshape(-1)
        token[:] = 0
        for d in range(head_dim):
            code = _level(get(x, item * head_dim + d), lo, size, highest)
            for j in range(n_bits):
                bit = (code >> np.int32(j) & np.int32(1)) << np.int32(d % BYTE_BITS)
                token[j * n_bytes + d // BYTE_BITS] |= np.uint8(bit)


@jit
def _level(x: Scalar, low: Scalar, size: Scalar, highest: Scalar) -> Scalar:
    if size == ZERO:
        return np.int32(0)
    position = clamp((x - low) / size, ZERO, highest)
    return np.int32(round_to_even(position))


@jit
def _ends(low: U16, step: U16, g: int, t: int) -> tuple[Scalar, Scalar]:
    """low and step of head g's token t, where all heads or all tokens may share one."""
    row, column = min(g, low.shape[0] - 1), min(t, low.shape[1] - 1)
    return as_float(low[row, column]), as_float(step[row, column])


@score_loop
def _score(store: int, q: int, rows: int, g: int, t: int, n: int, s: int, gap: int, scratch: int) -> None:
    head_dim, planes, capacity, n_bits, low_at, step_at, gap_head, gap_token = _numbers(store)
    queries, to, codes = floats(q), floats(s), chars(scratch)
    low, step, n_bytes = halves(low_at), halves(step_at), (head_dim + BYTE_BITS - 1) // BYTE_BITS
    for i in range(0, n, BLOCK):
        few, end = min(BLOCK, n - i), g * gap_head + (t + i) * gap_token
        unpack(chars(planes), (g * capacity + t + i) * n_bits * n_bytes, n_bits, n_bytes, few, head_dim, codes)
        score_codes(queries, 0, rows, codes, 0, few, head_dim, to, i, gap)
        for m in range(rows):
            _scale(to, m * gap + i, few, get(queries, rows * head_dim + m), low, step, end, gap_token)


@fast_jit
def _scale(s: F32, row: int, n: int, total: Scalar, low: U16, step: U16, end: int, gap: int) -> None:
    """s[row:][:n] = low * total + step * s, of tokens whose ends lie at ``end`` and then ``gap`` apart."""
    lo, size = as_float(get(low, end)), as_float(get(step, end))
    for i in range(n):
        if gap:
            lo, size = as_float(get(low, end + i)), as_float(get(step, end + i))
        put(s, row + i, lo * total + size * get(s, row + i))


@add_loop
def _add(store: int, p: int, gap: int, rows: int, g: int, t: int, n: int, out: int, scratch: int) -> None:
    head_dim, planes, capacity, n_bits, low_at, step_at, gap_head, gap_token = _numbers(store)
    chances, to, weights = floats(p), floats(out), floats(scratch)
    codes, low, step = chars(scratch + 4 * ROWS * BLOCK), halves(low_at), halves(step_at)
    n_bytes = (head_dim + BYTE_BITS - 1) // BYTE_BITS
    for i in range(0, n, BLOCK):
        few, end = min(BLOCK, n - i), g * gap_head + (t + i) * gap_token
        unpack(chars(planes), (g * capacity + t + i) * n_bits * n_bytes, n_bits, n_bytes, few, head_dim, codes)
        for m in range(0, rows, ROWS):
            n_rows, target = min(ROWS, rows - m), m * head_dim
            for r in range(n_rows):
                column = (m + r) * gap + i
                shift = _weigh(chances, column, few, low, step, end, gap_token, weights, r * BLOCK)
                add_constant(to, target + r * head_dim, head_dim, shift)
            add_codes(weights, 0, n_rows, codes, 0, few, head_dim, to, target)


@fast_jit
def _weigh(
    p: F32, column: int, n: int, low: U16, step: U16, end: int, gap: int, weights: F32, start: int
) -> Scalar:
    """weights[start:][:n] = p * step of tokens whose ends lie as in `_scale`; returns the sum of p * low."""
    shift = ZERO
    lo, size = as_float(get(low, end)), as_float(get(step, end))
    for i in range(n):
        if gap:
            lo, size = as_float(get(low, end + i)), as_float(get(step, end + i))
        put(weights, start + i, get(p, column + i) * size)
        shift += get(p, column + i) * lo
    return shift


@jit
def unpack(planes: U8, token: int, n_bits: int, n_bytes: int, n: int, head_dim: int, codes: U8) -> None:
    """codes (n, head_dim) of n tokens, from the highest plane down."""
    whole = head_dim // LANES * LANES
    for i in range(0, n * head_dim, head_dim):
        highest = token + (n_bits - 1) * n_bytes
        for d in range(0, whole, LANES):
            put_bits(codes, i + d, planes, highest + d // BYTE_BITS)
        for plane in range(highest - n_bytes, token - 1, -n_bytes):
            for d in range(0, whole, LANES):
                shift_in_bits(codes, i + d, planes, plane + d // BYTE_BITS)
        for d in range(whole, head_dim):
            code = 0
            for plane in range(highest, token - 1, -n_bytes):
                code += code + (get(planes, plane + d // BYTE_BITS) >> (d % BYTE_BITS) & 1)
            put(codes, i + d, np.uint8(code))
        token += n_bits * n_bytes


@jit
def _numbers(store: int) -> tuple[int, int, int, int, int, int, int, int]:
    x = numbers(store)
    return get(x, 0), get(x, 1), get(x, 2), get(x, 3), get(x, 4), get(x, 5), get(x, 6), get(x, 7)


def _store(codec: Any) -> tuple[int, ...]:
    """Where all heads or all tokens share their ends, these lie 0 apart."""
    planes, low, step = (codec.arrays[name] for name in ("planes", "low", "step"))
    heads, tokens = low.shape
    ends = address_of(low), address_of(step), tokens if heads > 1 else 0, 1 if tokens > 1 else 0
    return codec.head_dim, address_of(planes), *planes.shape[1:3], *ends


LOOPS = {
    "levels": Loops(
        _store,
        score=_score,
        add=_add,
        prepare=with_totals,
        prepared=prepared_bytes,
        scratch=lambda codec, rows: BLOCK * codec.head_dim + 4 * ROWS * BLOCK,
    )
}
