"""Symmetric integers of four or eight bits with a scale per token."""

from typing import Any

import numpy as np

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.cpu import simd
from edgekv.kernels.cpu.codes import (
    EIGHT_BITS,
    FOUR_BITS,
    Parts,
    add_four_rows,
    add_row,
    dot_four_rows,
    dot_row,
    prepared_bytes,
    with_totals,
)
from edgekv.kernels.cpu.compile import Args, Scalar, fast_jit, jit
from edgekv.kernels.cpu.launch import run
from edgekv.kernels.cpu.loops import Loops, add_loop, address_of, chars, floats, halves, numbers, score_loop
from edgekv.kernels.cpu.scalar import as_float, clamp, get, maximum, put, round_to_even, round_up_to_half
from edgekv.types import F32, U8, U16

LANES = simd.LANES
N_BITS = 6  # of the numbers of a store
ZERO, ONE = np.array([0, 1], np.float32)


def encode_sym(x: F32, codes: U8, scale: U16, t0: int) -> None:
    args = np.ascontiguousarray(x), codes, scale, t0
    run(_encode_tokens, x.shape[0] * x.shape[1], x.size, args)


@jit
def _encode_tokens(first: int, last: int, args: Args) -> None:
    x, codes, scale, t0 = args
    (_, n_tokens, head_dim), capacity = x.shape, scale.shape[1]
    n_blocks, n_bytes, block = codes.shape[1:]
    n_bits = 8 * n_bytes // head_dim
    top = np.float32((1 << (n_bits - 1)) - 1)
    x, codes, scale = x.reshape(-1), codes.reshape(-1), scale.reshape(-1)
    for item in range(first, last):
        g, t = item // n_tokens, t0 + item % n_tokens
        peak = ZERO
        for d in range(item * head_dim, (item + 1) * head_dim):
            peak = maximum(peak, abs(get(x, d)))
        bits = round_up_to_half(peak / top)
        step = as_float(bits)
        if step == ZERO:  # only if all elements are (nearly) zero: they round to 0
            step = ONE
        put(scale, g * capacity + t, bits)
        code = (g * n_blocks + t // block) * n_bytes * block + t % block
        for j in range(n_bytes):
            byte = 0
            for part in range(8 // n_bits):
                level = _level(get(x, item * head_dim + part * n_bytes + j), step, top)
                byte |= level << part * n_bits
            put(codes, code + j * block, np.uint8(byte))


@jit
def _level(x: Scalar, step: Scalar, top: Scalar) -> Scalar:
    """The code of x, from 1 up."""
    return np.int64(clamp(round_to_even(x / step), -top, top) + top + ONE)


@score_loop
def _score(store: int, q: int, rows: int, g: int, t: int, n: int, s: int, gap: int, scratch: int) -> None:
    if get(numbers(store), N_BITS) == 8:
        _score_blocks(EIGHT_BITS, store, q, rows, g, t, n, s, gap, scratch)
    else:
        _score_blocks(FOUR_BITS, store, q, rows, g, t, n, s, gap, scratch)


@fast_jit
def _score_blocks(
    parts: Parts, store: int, q: int, rows: int, g: int, t: int, n: int, s: int, gap: int, scratch: int
) -> None:
    head_dim, codes_at, scale_at, capacity, n_blocks, block, _ = _numbers(store)
    n_bytes, middle = head_dim // len(parts), np.float32(1 << (8 // len(parts) - 1))
    queries, dots, to = floats(q), floats(scratch), floats(s)
    codes, scale, totals = chars(codes_at), halves(scale_at), rows * head_dim
    for b in range(t // block, (t + n + block - 1) // block):
        i, end = max(t - b * block, 0), min(t + n - b * block, block)
        token, code = g * capacity + b * block, (g * n_blocks + b) * n_bytes * block
        row, m = b * block - t, 0
        for _ in range(rows // 4):
            dot_four_rows(parts, queries, m * head_dim, head_dim, codes, code, n_bytes, block, dots, 0)
            for k in range(4):
                shift = middle * get(queries, totals + m + k)
                _finish(dots, k * block, i, end, shift, scale, token, to, row)
                row += gap
            m += 4
        for _ in range(rows % 4):
            dot_row(parts, queries, m * head_dim, codes, code, n_bytes, block, dots, 0)
            _finish(dots, 0, i, end, middle * get(queries, totals + m), scale, token, to, row)
            row, m = row + gap, m + 1


@fast_jit
def _finish(
    dots: F32, dot: int, first: int, last: int, shift: Scalar, scale: U16, token: int, s: F32, row: int
) -> None:
    """Scores of tokens first..last of a block from the products with their codes."""
    for t in range(first, last):
        put(s, row + t, (get(dots, dot + t) - shift) * as_float(get(scale, token + t)))


@add_loop
def _add(store: int, p: int, gap: int, rows: int, g: int, t: int, n: int, out: int, scratch: int) -> None:
    head_dim, codes, scale, capacity, _, _, n_bits = _numbers(store)
    token = g * capacity + t
    add_sym(codes, scale, n_bits, head_dim, p, gap, rows, token, n, out, scratch)


@fast_jit
def add_sym(
    codes: int,
    scale: int,
    n_bits: int,
    head_dim: int,
    p: int,
    gap: int,
    rows: int,
    token: int,
    n: int,
    out: int,
    scratch: int,
) -> None:
    """out (rows, head_dim) += p[m * gap + t] times the t-th of n tokens of symmetric codes from ``token`` on.

    The other arguments are addresses and sizes; ``scratch`` has room for 4 * BLOCK weights.
    """
    for i in range(0, n, BLOCK):
        few, at = min(BLOCK, n - i), p + 4 * i
        if n_bits == 8:
            _add_tokens(EIGHT_BITS, codes, scale, head_dim, at, gap, rows, token + i, few, out, scratch)
        else:
            _add_tokens(FOUR_BITS, codes, scale, head_dim, at, gap, rows, token + i, few, out, scratch)


@fast_jit
def _add_tokens(
    parts: Parts,
    codes_at: int,
    scale_at: int,
    head_dim: int,
    p: int,
    gap: int,
    rows: int,
    token: int,
    n: int,
    out: int,
    scratch: int,
) -> None:
    n_bytes, middle = head_dim // len(parts), np.float32(1 << (8 // len(parts) - 1))
    codes, scale, chances, to, weights = chars(codes_at), halves(scale_at), floats(p), floats(out), floats(scratch)
    for m in range(rows):
        w, row = m % 4 * BLOCK, m * head_dim
        total = _weigh(chances, m * gap, n, scale, token, weights, w)
        for d in range(row, row + head_dim):
            put(to, d, get(to, d) - middle * total)
        if m >= rows // 4 * 4:
            add_row(parts, weights, w, n, head_dim, codes, token * n_bytes, n_bytes, to, row)
        elif m % 4 == 3:
            row -= 3 * head_dim
            add_four_rows(parts, weights, 0, BLOCK, n, head_dim, codes, token * n_bytes, n_bytes, to, row)


@fast_jit
def _weigh(p: F32, column: int, n: int, scale: U16, token: int, weights: F32, w: int) -> Scalar:
    """weights = p * scale, so that codes need no scale; returns their sum."""
    whole = n // LANES * LANES
    totals = simd.splat(ZERO)
    for t in range(0, whole, LANES):
        a = simd.multiply(simd.load(p, column + t), simd.load(scale, token + t))
        simd.store(weights, w + t, a)
        totals = simd.add(totals, a)
    total = simd.total(totals)
    for t in range(whole, n):
        weight = get(p, column + t) * as_float(get(scale, token + t))
        put(weights, w + t, weight)
        total += weight
    return total


@jit
def _numbers(store: int) -> tuple[int, int, int, int, int, int, int]:
    x = numbers(store)
    return get(x, 0), get(x, 1), get(x, 2), get(x, 3), get(x, 4), get(x, 5), get(x, N_BITS)


def _store(codec: Any) -> tuple[int, ...]:
    codes, scale = codec.arrays["codes"], codec.arrays["scale"]
    _, n_blocks, n_bytes, block = codes.shape
    n_bits = 8 * n_bytes // codec.head_dim
    return codec.head_dim, address_of(codes), address_of(scale), scale.shape[1], n_blocks, block, n_bits


def _encode(codec: Any, x: F32, t0: int) -> None:
    encode_sym(x, codec.arrays["codes"], codec.arrays["scale"], t0)


LOOPS = {
    "symmetric_keys": Loops(
        _store,
        score=_score,
        prepare=with_totals,
        prepared=prepared_bytes,
        scratch=lambda codec, rows: 4 * 4 * codec.block,
        encode=_encode,
    ),
    "symmetric_values": Loops(_store, add=_add, scratch=lambda codec, rows: 4 * 4 * BLOCK, encode=_encode),
}
