"""Rotations: of heads by position (RoPE), and of keys and values by a Hadamard transform or a matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.compile import Args, Scalar, fast_jit, intrinsic, jit
from edgekv.kernels.cpu.launch import flat, run
from edgekv.kernels.cpu.loops import address_of
from edgekv.kernels.cpu.scalar import get, put
from edgekv.types import F32

ELEMENT_WORK = 3  # load, rotate, store, in multiply-adds
ONE = np.float32(1)


def split_rope(
    qkv: F32,
    cos: F32,
    sin: F32,
    q: F32,
    k: F32,
    v: F32,
    scale: float,
    q_norm: F32,
    k_norm: F32,
    eps: float,
) -> None:
    """Splits qkv (n, (H + 2G) * D) into q (H, n, D) and k, v (G, n, D), rotated by cos, sin (n, rot // 2)."""
    (n_heads, n_tokens, head_dim), n_kv_heads = q.shape, k.shape[0]
    sizes = n_heads, n_kv_heads, head_dim, cos.shape[1]
    inputs = tuple(np.ascontiguousarray(x).reshape(-1) for x in (qkv, cos, sin, q_norm, k_norm))
    args = (*sizes, *inputs, *flat(q), *flat(k), *flat(v), np.float32(scale), np.float32(eps))
    run(_split_tokens, n_tokens, ELEMENT_WORK * qkv.size, args)


@fast_jit
def _split_tokens(first: int, last: int, args: Args) -> None:
    n_heads, n_kv_heads, head_dim, half, qkv, cos, sin, q_norm, k_norm = args[:9]
    q, q_gap_h, q_gap_t, k, k_gap_h, k_gap_t, v, v_gap_h, v_gap_t, scale, eps = args[9:]
    for t in range(first, last):
        x = t * (n_heads + 2 * n_kv_heads) * head_dim
        for h in range(n_heads):
            y = h * q_gap_h + t * q_gap_t
            _normalise(qkv, x, head_dim, q_norm, eps, scale, q, y)
            _rotate(cos, sin, t * half, half, q, y)
            x += head_dim
        for h in range(n_kv_heads):
            y = h * k_gap_h + t * k_gap_t
            _normalise(qkv, x, head_dim, k_norm, eps, ONE, k, y)
            _rotate(cos, sin, t * half, half, k, y)
            x += head_dim
        for h in range(n_kv_heads):
            y = h * v_gap_h + t * v_gap_t
            for d in range(head_dim):
                put(v, y + d, get(qkv, x + d))
            x += head_dim


@fast_jit
def _normalise(x: F32, i: int, head_dim: int, weight: F32, eps: Scalar, scale: Scalar, out: F32, j: int) -> None:
    """out[j:] = the RMS norm of the head x[i:], or x if there are no weights, times scale."""
    if len(weight) == 0:
        for d in range(head_dim):
            put(out, j + d, get(x, i + d) * scale)
        return
    squares = np.float32(0)
    for d in range(head_dim):
        squares += get(x, i + d) * get(x, i + d)
    factor = scale / np.sqrt(squares / np.float32(head_dim) + eps)
    for d in range(head_dim):
        put(out, j + d, get(x, i + d) * factor * get(weight, d))


@fast_jit
def _rotate(cos: F32, sin: F32, i: int, half: int, x: F32, j: int) -> None:
    """Rotates the head x[j:] in place by the angles from i on."""
    for d in range(half):
        x1, x2, c, s = get(x, j + d), get(x, j + half + d), get(cos, i + d), get(sin, i + d)
        put(x, j + d, x1 * c - x2 * s)
        put(x, j + half + d, x2 * c + x1 * s)


LANES = emit.LANES
VECTOR = emit.vector(emit.F32, LANES)
ROW_WORK = 2  # of one element, in multiply-adds
ZERO = np.float32(0)


def hadamard(x: F32, flips: F32, out: F32) -> None:
    """Fills out (A, n, D) with the transform of x (A, n, d)."""
    args = np.ascontiguousarray(x), flips, _scale(flips), out
    run(_rows, out.shape[0] * out.shape[1], ROW_WORK * out.size, args)


def hadamard_back(x: F32, flips: F32, out: F32) -> None:
    """Adds the inverse of `hadamard` of x (A, n, D) to out (A, n, d)."""
    args = np.array(x), flips, _scale(flips), out
    run(_back_rows, out.shape[0] * out.shape[1], ROW_WORK * x.size, args)


def project(x: F32, matrix: F32) -> F32:
    """Returns x (G, n, d) times the transpose of matrix (b, d): (G, n, b)."""
    result: F32 = x @ matrix.T
    return result


def _scale(flips: F32) -> Any:
    return np.float32(1 / np.sqrt(len(flips)))


@jit
def _rows(first: int, last: int, args: Args) -> None:
    x, flips, scale, out = args
    given, width = x.shape[2], len(flips)
    x, out = x.reshape(-1), out.reshape(-1)
    for item in range(first, last):
        for d in range(given):
            put(out, item * width + d, get(x, item * given + d) * get(flips, d))
        for d in range(given, width):
            put(out, item * width + d, ZERO)
        _transform(out, item * width, width, scale)


@jit
def _back_rows(first: int, last: int, args: Args) -> None:
    x, flips, scale, out = args
    wanted, width = out.shape[2], len(flips)
    x, out = x.reshape(-1), out.reshape(-1)
    for item in range(first, last):
        _transform(x, item * width, width, scale)
        for d in range(wanted):
            i = item * wanted + d
            put(out, i, get(out, i) + get(x, item * width + d) * get(flips, d))


@jit
def rotate_row(
    q: F32, query: int, n: int, flips: F32, matrix: F32, is_hadamard: int, width: int, x: F32, row: int
) -> None:
    """x[row:][:width] = P q[query:][:n]: a Hadamard transform behind signs, or a matrix (width, n)."""
    if is_hadamard:
        for d in range(n):
            put(x, row + d, get(q, query + d) * get(flips, d))
        for d in range(n, width):
            put(x, row + d, ZERO)
        _transform(x, row, width, np.float32(1 / np.sqrt(width)))
    else:
        multiply_row(q, query, n, matrix, width, x, row)


@jit
def rotate_back_row(
    x: F32, row: int, width: int, flips: F32, inverse: F32, is_hadamard: int, out: F32, target: int, n: int
) -> None:
    """out[target:][:n] += the inverse of P of x[row:][:width], which is used up."""
    if is_hadamard:
        _transform(x, row, width, np.float32(1 / np.sqrt(width)))
        for d in range(n):
            put(out, target + d, get(out, target + d) + get(x, row + d) * get(flips, d))
    else:
        for d in range(n):
            put(out, target + d, get(out, target + d) + product(x, row, inverse, d * width, width))


@jit
def multiply_row(q: F32, query: int, n: int, matrix: F32, n_rows: int, x: F32, row: int) -> None:
    """x[row:][:n_rows] = matrix (n_rows, n) times q[query:][:n]."""
    for i in range(n_rows):
        put(x, row + i, product(q, query, matrix, i * n, n))


@fast_jit
def product(a: F32, i: int, b: F32, j: int, n: int) -> Scalar:
    """a[i:][:n] times b[j:][:n]."""
    total = ZERO
    for d in range(n):
        total += get(a, i + d) * get(b, j + d)
    return total


def rotation_numbers(rotation: Any) -> dict[str, int]:
    """For a store: whether it is a Hadamard transform, its signs or its matrix, and the inverse matrix."""
    if rotation.flips is None:
        return {"is_hadamard": 0, "matrix": address_of(rotation.matrix), "inverse": address_of(rotation.inverse)}
    return {"is_hadamard": 1, "matrix": address_of(rotation.flips), "inverse": 0}


@jit
def _transform(x: F32, start: int, width: int, scale: Scalar) -> None:
    """x[start:][:width] becomes scale * H x."""
    distance = width // 2
    while distance >= LANES:
        for pair in range(start, start + width, 2 * distance):
            for i in range(pair, pair + distance, LANES):
                _add_and_subtract(x, i, distance)
        distance //= 2
    if width >= LANES:
        for i in range(start, start + width, LANES):
            _transform_vector(x, i, scale)
        return
    while distance:
        for pair in range(start, start + width, 2 * distance):
            for i in range(pair, pair + distance):
                a, b = get(x, i), get(x, i + distance)
                put(x, i, a + b)
                put(x, i + distance, a - b)
        distance //= 2
    for i in range(start, start + width):
        put(x, i, get(x, i) * scale)


@intrinsic
def _add_and_subtract(context: Any, x: Any, i: Any, distance: Any) -> Any:
    """Vectors a at x[i:] and b behind, ``distance`` elements apart, become a + b and a - b."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        one = emit.address(context, b, x, args)
        other = b.add(one, b.mul(args[2], emit.I64(4)))
        first, second = emit.load(b, VECTOR, one), emit.load(b, VECTOR, other)
        emit.store(b, b.fadd(first, second), one)
        emit.store(b, b.fsub(first, second), other)
        return context.get_dummy_value()

    return types.none(x, types.intp, types.intp), build


@intrinsic
def _transform_vector(context: Any, x: Any, i: Any, scale: Any) -> Any:
    """The vector v at x[i:] becomes scale * H v."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        place, distance = emit.address(context, b, x, args), LANES // 2
        value = emit.load(b, VECTOR, place)
        while distance:
            other = emit.lanes(b, value, [lane ^ distance for lane in range(LANES)])
            signs = ir.Constant(VECTOR, [-1.0 if lane & distance else 1.0 for lane in range(LANES)])
            value = b.fadd(other, b.fmul(value, signs))
            distance //= 2
        emit.store(b, b.fmul(emit.splat(b, args[2], LANES), value), place)
        return context.get_dummy_value()

    return types.none(x, types.intp, types.float32), build
