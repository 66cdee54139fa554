"""Products with tokens of byte codes that lie in the core's own cache, each code widened once for four rows."""

import numpy as np

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.cpu import simd
from edgekv.kernels.cpu.half import as_float
from edgekv.kernels.cpu.jit import Scalar, fast_jit
from edgekv.kernels.cpu.scalar import get, put
from edgekv.types import F32, U8, U16

LANES = simd.LANES
ROWS = 4  # that share a widened code
BYTE = 255
ZERO = np.float32(0)


@fast_jit
def score_codes(
    q: F32, query: int, n_rows: int, codes: U8, code: int, n: int, head_dim: int, s: F32, row: int, gap_m: int
) -> None:
    """s[row + m * gap_m + t] = q[query + m * head_dim:] times codes[code + t * head_dim:], all m, all t."""
    for _ in range(n_rows // ROWS):
        _score_four_rows(q, query, codes, code, n, head_dim, s, row, gap_m)
        query, row = query + ROWS * head_dim, row + ROWS * gap_m
    for _ in range(n_rows % ROWS):
        _score_row(q, query, codes, code, n, head_dim, s, row)
        query, row = query + head_dim, row + gap_m


@fast_jit
def _score_row(q: F32, query: int, codes: U8, code: int, n: int, head_dim: int, s: F32, row: int) -> None:
    whole = head_dim // LANES * LANES
    for t in range(n):
        a = simd.splat(ZERO)
        for d in range(0, whole, LANES):
            a = simd.multiply_add(simd.load(q, query + d), simd.load_codes(codes, code + d, 0, BYTE), a)
        score = simd.total(a)
        for d in range(whole, head_dim):
            score += get(q, query + d) * np.float32(get(codes, code + d))
        put(s, row + t, score)
        code += head_dim


@fast_jit
def _score_four_rows(
    q: F32, query: int, codes: U8, code: int, n: int, head_dim: int, s: F32, row: int, gap_m: int
) -> None:
    whole = head_dim // LANES * LANES
    q0, q1, q2, q3 = query, query + head_dim, query + 2 * head_dim, query + 3 * head_dim
    for t in range(n):
        a0 = a1 = a2 = a3 = simd.splat(ZERO)
        for d in range(0, whole, LANES):
            x = simd.load_codes(codes, code + d, 0, BYTE)
            a0 = simd.multiply_add(simd.load(q, q0 + d), x, a0)
            a1 = simd.multiply_add(simd.load(q, q1 + d), x, a1)
            a2 = simd.multiply_add(simd.load(q, q2 + d), x, a2)
            a3 = simd.multiply_add(simd.load(q, q3 + d), x, a3)
        score0, score1, score2, score3 = simd.total(a0), simd.total(a1), simd.total(a2), simd.total(a3)
        for d in range(whole, head_dim):
            y = np.float32(get(codes, code + d))
            score0 += get(q, q0 + d) * y
            score1 += get(q, q1 + d) * y
            score2 += get(q, q2 + d) * y
            score3 += get(q, q3 + d) * y
        put(s, row + t, score0)
        put(s, row + gap_m + t, score1)
        put(s, row + 2 * gap_m + t, score2)
        put(s, row + 3 * gap_m + t, score3)
        code += head_dim


@fast_jit
def weigh(p: F32, column: int, n: int, low: U16, step: U16, token: int, w: F32, start: int) -> Scalar:
    """w[start:][:n] = p * step, the weights of the codes; returns the sum of p * low."""
    shift = ZERO
    for t in range(n):
        weight = get(p, column + t)
        put(w, start + t, weight * as_float(get(step, token + t)))
        shift += weight * as_float(get(low, token + t))
    return shift


@fast_jit
def add_constant(out: F32, target: int, n: int, x: Scalar) -> None:
    """out[target:][:n] += x."""
    for d in range(n):
        put(out, target + d, get(out, target + d) + x)


@fast_jit
def add_codes(
    w: F32, start: int, n_rows: int, codes: U8, code: int, n: int, head_dim: int, out: F32, target: int
) -> None:
    """out[target + m * head_dim:][:head_dim] += sum of w[start + m * BLOCK + t] * codes[code + t * head_dim:]."""
    for _ in range(n_rows // ROWS):
        _add_to_four_rows(w, start, codes, code, n, head_dim, out, target)
        start, target = start + ROWS * BLOCK, target + ROWS * head_dim
    for _ in range(n_rows % ROWS):
        _add_to_row(w, start, codes, code, n, head_dim, out, target)
        start, target = start + BLOCK, target + head_dim


@fast_jit
def _add_to_row(w: F32, start: int, codes: U8, code: int, n: int, head_dim: int, out: F32, target: int) -> None:
    tile = 4 * LANES
    whole = head_dim // tile * tile
    for d in range(0, whole, tile):
        i, j = target + d, code + d
        a0, a1 = simd.load(out, i), simd.load(out, i + LANES)
        a2, a3 = simd.load(out, i + 2 * LANES), simd.load(out, i + 3 * LANES)
        for t in range(n):
            x = simd.broadcast(w, start + t)
            a0 = simd.multiply_add(x, simd.load_codes(codes, j, 0, BYTE), a0)
            a1 = simd.multiply_add(x, simd.load_codes(codes, j + LANES, 0, BYTE), a1)
            a2 = simd.multiply_add(x, simd.load_codes(codes, j + 2 * LANES, 0, BYTE), a2)
            a3 = simd.multiply_add(x, simd.load_codes(codes, j + 3 * LANES, 0, BYTE), a3)
            j += head_dim
        simd.store(out, i, a0)
        simd.store(out, i + LANES, a1)
        simd.store(out, i + 2 * LANES, a2)
        simd.store(out, i + 3 * LANES, a3)
    _add_columns(w, start, codes, code, n, whole, head_dim, out, target)


@fast_jit
def _add_to_four_rows(
    w: F32, start: int, codes: U8, code: int, n: int, head_dim: int, out: F32, target: int
) -> None:
    tile = 2 * LANES
    whole = head_dim // tile * tile
    w1, w2, w3 = start + BLOCK, start + 2 * BLOCK, start + 3 * BLOCK
    for d in range(0, whole, tile):
        i0, j = target + d, code + d
        i1, i2, i3 = i0 + head_dim, i0 + 2 * head_dim, i0 + 3 * head_dim
        a0, b0 = simd.load(out, i0), simd.load(out, i0 + LANES)
        a1, b1 = simd.load(out, i1), simd.load(out, i1 + LANES)
        a2, b2 = simd.load(out, i2), simd.load(out, i2 + LANES)
        a3, b3 = simd.load(out, i3), simd.load(out, i3 + LANES)
        for t in range(n):
            x, y = simd.load_codes(codes, j, 0, BYTE), simd.load_codes(codes, j + LANES, 0, BYTE)
            p0, p1 = simd.broadcast(w, start + t), simd.broadcast(w, w1 + t)
            p2, p3 = simd.broadcast(w, w2 + t), simd.broadcast(w, w3 + t)
            a0, b0 = simd.multiply_add(p0, x, a0), simd.multiply_add(p0, y, b0)
            a1, b1 = simd.multiply_add(p1, x, a1), simd.multiply_add(p1, y, b1)
            a2, b2 = simd.multiply_add(p2, x, a2), simd.multiply_add(p2, y, b2)
            a3, b3 = simd.multiply_add(p3, x, a3), simd.multiply_add(p3, y, b3)
            j += head_dim
        simd.store(out, i0, a0)
        simd.store(out, i0 + LANES, b0)
        simd.store(out, i1, a1)
        simd.store(out, i1 + LANES, b1)
        simd.store(out, i2, a2)
        simd.store(out, i2 + LANES, b2)
        simd.store(out, i3, a3)
        simd.store(out, i3 + LANES, b3)
    for m in range(ROWS):
        _add_columns(w, start + m * BLOCK, codes, code, n, whole, head_dim, out, target + m * head_dim)


@fast_jit
def _add_columns(
    w: F32, start: int, codes: U8, code: int, n: int, first: int, head_dim: int, out: F32, target: int
) -> None:
    """The columns from `first` on, which do not fill a tile."""
    for t in range(n):
        x = get(w, start + t)
        for d in range(first, head_dim):
            y = np.float32(get(codes, code + t * head_dim + d))
            put(out, target + d, get(out, target + d) + x * y)
