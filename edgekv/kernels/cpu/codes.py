"""What sums over small codes are made of: rows of unsigned integers of 8, 4 or 2 bits, times weights.

A head's elements lie in n_bytes bytes, byte j holding elements j, j + n_bytes, ... from its low bits up. `parts`
is a tuple of as many numbers as a byte has elements: its type carries the width, for which all is compiled.
"""

from typing import Any

import numpy as np

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.cpu import simd
from edgekv.kernels.cpu.compile import fast_jit
from edgekv.kernels.cpu.loops import floats, numbers, prepare_loop
from edgekv.kernels.cpu.scalar import get, put
from edgekv.types import F32, U8

LANES = simd.LANES
TILE = 2 * LANES
ZERO = np.float32(0)
Parts = tuple[int, ...]
EIGHT_BITS, FOUR_BITS, TWO_BITS = (0,), (0, 1), (0, 1, 2, 3)


@prepare_loop
def with_totals(store: int, q: int, rows: int, g: int, prepared: int) -> None:
    """The queries, and behind them the sum of each: what an offset of all codes of a token is multiplied by.

    A store's first number is head_dim.
    """
    head_dim, queries, target = get(numbers(store), 0), floats(q), floats(prepared)
    for m in range(rows):
        total = ZERO
        for d in range(m * head_dim, (m + 1) * head_dim):
            x = get(queries, d)
            put(target, d, x)
            total += x
        put(target, rows * head_dim + m, total)


def prepared_bytes(codec: Any, rows: int) -> int:
    """Of `with_totals`."""
    size: int = 4 * rows * (codec.head_dim + 1)
    return size


@fast_jit
def dot_row(
    parts: Parts, q: F32, query: int, codes: U8, code: int, n_bytes: int, block: int, dots: F32, dot: int
) -> None:
    """dots[dot:][:block] = the row q[query:] times the codes of a block of tokens, token innermost.

    `block` is a multiple of 32: of whole tiles, whatever the processor's vectors.
    """
    n_bits = 8 // len(parts)
    mask = (1 << n_bits) - 1
    for i in range(0, block, TILE):
        a0 = a1 = b0 = b1 = simd.splat(ZERO)
        j = code + i
        for byte in range(query, query + n_bytes):
            simd.prefetch(codes, j + n_bytes * block)
            for part in range(len(parts)):
                w = simd.broadcast(q, byte + part * n_bytes)
                x0 = simd.load_codes(codes, j, part * n_bits, mask)
                x1 = simd.load_codes(codes, j + LANES, part * n_bits, mask)
                if part % 2:
                    b0, b1 = simd.multiply_add(w, x0, b0), simd.multiply_add(w, x1, b1)
                else:
                    a0, a1 = simd.multiply_add(w, x0, a0), simd.multiply_add(w, x1, a1)
            j += block
        simd.store(dots, dot + i, simd.add(a0, b0))
        simd.store(dots, dot + i + LANES, simd.add(a1, b1))


@fast_jit
def dot_four_rows(
    parts: Parts,
    q: F32,
    query: int,
    head_dim: int,
    codes: U8,
    code: int,
    n_bytes: int,
    block: int,
    dots: F32,
    dot: int,
) -> None:
    """`dot_row` for four neighbouring rows of q and of dots: each code is unpacked once."""
    n_bits = 8 // len(parts)
    mask = (1 << n_bits) - 1
    for i in range(0, block, TILE):
        a0 = a1 = b0 = b1 = c0 = c1 = d0 = d1 = simd.splat(ZERO)
        j = code + i
        for byte in range(query, query + n_bytes):
            simd.prefetch(codes, j + n_bytes * block)
            for part in range(len(parts)):
                element = byte + part * n_bytes
                x0 = simd.load_codes(codes, j, part * n_bits, mask)
                x1 = simd.load_codes(codes, j + LANES, part * n_bits, mask)
                w = simd.broadcast(q, element)
                a0, a1 = simd.multiply_add(w, x0, a0), simd.multiply_add(w, x1, a1)
                w = simd.broadcast(q, element + head_dim)
                b0, b1 = simd.multiply_add(w, x0, b0), simd.multiply_add(w, x1, b1)
                w = simd.broadcast(q, element + 2 * head_dim)
                c0, c1 = simd.multiply_add(w, x0, c0), simd.multiply_add(w, x1, c1)
                w = simd.broadcast(q, element + 3 * head_dim)
                d0, d1 = simd.multiply_add(w, x0, d0), simd.multiply_add(w, x1, d1)
            j += block
        _store_two(dots, dot + i, a0, a1)
        _store_two(dots, dot + block + i, b0, b1)
        _store_two(dots, dot + 2 * block + i, c0, c1)
        _store_two(dots, dot + 3 * block + i, d0, d1)


@fast_jit
def _store_two(x: F32, i: int, a: Any, b: Any) -> None:
    simd.store(x, i, a)
    simd.store(x, i + LANES, b)


@fast_jit
def add_row(
    parts: Parts,
    weights: F32,
    w: int,
    n: int,
    span: int,
    codes: U8,
    code: int,
    n_bytes: int,
    out: F32,
    target: int,
) -> None:
    """out[target:] += the sum over n tokens of their codes, n_bytes apart, times their weights.

    Each `span` of elements has weights of its own: BLOCK from weights[w] on for the first, the next behind them.
    """
    tile = 4 * LANES // len(parts)  # bytes of four vectors
    whole = _whole(tile, n_bytes, span)
    for d in range(0, whole, tile):
        e0, e1 = _element(parts, d, n_bytes, 0), _element(parts, d, n_bytes, 1)
        e2, e3 = _element(parts, d, n_bytes, 2), _element(parts, d, n_bytes, 3)
        w0, w1 = w + e0 // span * BLOCK, w + e1 // span * BLOCK
        w2, w3 = w + e2 // span * BLOCK, w + e3 // span * BLOCK
        a0, a1 = simd.load(out, target + e0), simd.load(out, target + e1)
        a2, a3 = simd.load(out, target + e2), simd.load(out, target + e3)
        j = code + d
        for t in range(n):
            simd.prefetch(codes, j + BLOCK * n_bytes)
            a0 = simd.multiply_add(simd.broadcast(weights, w0 + t), _load(parts, codes, j, 0), a0)
            a1 = simd.multiply_add(simd.broadcast(weights, w1 + t), _load(parts, codes, j, 1), a1)
            a2 = simd.multiply_add(simd.broadcast(weights, w2 + t), _load(parts, codes, j, 2), a2)
            a3 = simd.multiply_add(simd.broadcast(weights, w3 + t), _load(parts, codes, j, 3), a3)
            j += n_bytes
        simd.store(out, target + e0, a0)
        simd.store(out, target + e1, a1)
        simd.store(out, target + e2, a2)
        simd.store(out, target + e3, a3)
    _add_rest(parts, weights, w, n, span, codes, code, n_bytes, out, target, whole)


@fast_jit
def add_four_rows(
    parts: Parts,
    weights: F32,
    w: int,
    gap_w: int,
    n: int,
    span: int,
    codes: U8,
    code: int,
    n_bytes: int,
    out: F32,
    target: int,
) -> None:
    """`add_row` for four neighbouring rows of out, whose weights are gap_w apart: each code is unpacked once."""
    n_bits, head_dim = 8 // len(parts), len(parts) * n_bytes
    whole = _whole(LANES, n_bytes, span)
    for part in range(len(parts)):
        for d in range(0, whole, LANES):
            element = part * n_bytes + d
            row, i, j = w + element // span * BLOCK, target + element, code + d
            a0, a1 = simd.load(out, i), simd.load(out, i + head_dim)
            a2, a3 = simd.load(out, i + 2 * head_dim), simd.load(out, i + 3 * head_dim)
            for t in range(row, row + n):
                if part == 0:
                    simd.prefetch(codes, j + BLOCK * n_bytes)
                x = simd.load_codes(codes, j, part * n_bits, (1 << n_bits) - 1)
                a0 = simd.multiply_add(simd.broadcast(weights, t), x, a0)
                a1 = simd.multiply_add(simd.broadcast(weights, t + gap_w), x, a1)
                a2 = simd.multiply_add(simd.broadcast(weights, t + 2 * gap_w), x, a2)
                a3 = simd.multiply_add(simd.broadcast(weights, t + 3 * gap_w), x, a3)
                j += n_bytes
            simd.store(out, i, a0)
            simd.store(out, i + head_dim, a1)
            simd.store(out, i + 2 * head_dim, a2)
            simd.store(out, i + 3 * head_dim, a3)
    for k in range(4):
        row = target + k * head_dim
        _add_rest(parts, weights, w + k * gap_w, n, span, codes, code, n_bytes, out, row, whole)


@fast_jit
def _whole(tile: int, n_bytes: int, span: int) -> int:
    """Bytes that whole tiles of vectors cover: none where a vector's elements would not share their weights."""
    return n_bytes // tile * tile if span % LANES == 0 and n_bytes % LANES == 0 else 0


@fast_jit
def _add_rest(
    parts: Parts,
    weights: F32,
    w: int,
    n: int,
    span: int,
    codes: U8,
    code: int,
    n_bytes: int,
    out: F32,
    target: int,
    first: int,
) -> None:
    """`add_row` for the elements of the bytes from `first` on, one by one."""
    n_bits = 8 // len(parts)
    for part in range(len(parts)):
        for d in range(first, n_bytes):
            element = part * n_bytes + d
            row, total = w + element // span * BLOCK, ZERO
            for t in range(n):
                level = (get(codes, code + t * n_bytes + d) >> (part * n_bits)) & ((1 << n_bits) - 1)
                total += get(weights, row + t) * np.float32(level)
            put(out, target + element, get(out, target + element) + total)


@fast_jit
def _element(parts: Parts, byte: int, n_bytes: int, k: int) -> int:
    """Where the k-th of four vectors of elements lies: first the parts of a vector of bytes, then the next."""
    return byte + k // len(parts) * LANES + k % len(parts) * n_bytes


@fast_jit
def _load(parts: Parts, codes: U8, j: int, k: int) -> simd.Vector:
    n_bits = 8 // len(parts)
    return simd.load_codes(codes, j + k // len(parts) * LANES, k % len(parts) * n_bits, (1 << n_bits) - 1)
