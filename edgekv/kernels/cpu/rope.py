"""Rotations: of heads by position (RoPE), and of keys and values by a Hadamard transform or a matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.compile import Scalar, fast_jit, intrinsic, jit
from edgekv.kernels.cpu.emit import Value
from edgekv.kernels.cpu.launch import RangeKernel, exact_kernel, rows_view
from edgekv.kernels.cpu.loops import address_of, float_of, floats, load_arguments
from edgekv.kernels.cpu.scalar import get, put
from edgekv.types import F32

ELEMENT_WORK = 3  # load, rotate, store, in multiply-adds
ONE = np.float32(1)


def split_rope(
    qkv: F32, cos: F32, sin: F32, q: F32, k: F32, v: F32, scale: float, q_norm: F32, k_norm: F32, eps: float
) -> None:
    """Splits qkv (n, (H + 2G) * D) into q (H, n, D) and k, v (G, n, D), rotated by cos, sin (n, rot // 2)."""
    (n_heads, n_tokens, head_dim), n_kv_heads = q.shape, k.shape[0]
    args = n_heads, n_kv_heads, head_dim, cos.shape[1], float(scale), float(eps)
    qkv, cos, sin, q_norm, k_norm = (np.ascontiguousarray(x) for x in (qkv, cos, sin, q_norm, k_norm))
    norms = (norm if norm.size else 0 for norm in (q_norm, k_norm))
    outputs = *rows_view(q), *rows_view(k), *rows_view(v)
    _split_tokens(n_tokens, ELEMENT_WORK * qkv.size, *args, qkv, cos, sin, *norms, *outputs)


@RangeKernel
def _split_tokens(first: int, last: int, thread: int, arguments: int) -> None:
    n_heads, n_kv_heads, head_dim, half, scale, eps = load_arguments(arguments, 6)
    qkv, cos, sin, q_norm, k_norm = load_arguments(arguments + 8 * 6, 5)
    q, q_stride_h, q_stride_t, k, k_stride_h, k_stride_t, v, v_stride_h, v_stride_t = load_arguments(
        arguments + 8 * 11, 9
    )
    for t in range(first, last):
        x = qkv + 4 * t * (n_heads + 2 * n_kv_heads) * head_dim
        for h in range(n_heads + 2 * n_kv_heads):
            if h < n_heads:
                y, norm, factor = q + 4 * (h * q_stride_h + t * q_stride_t), q_norm, float_of(scale)
            elif h < n_heads + n_kv_heads:
                y, norm, factor = k + 4 * ((h - n_heads) * k_stride_h + t * k_stride_t), k_norm, ONE
            else:
                y, norm, factor = v + 4 * ((h - n_heads - n_kv_heads) * v_stride_h + t * v_stride_t), 0, ONE
            _normalise(floats(x), head_dim, norm, float_of(eps), factor, floats(y))
            if h < n_heads + n_kv_heads:
                _rotate(floats(cos + 4 * t * half), floats(sin + 4 * t * half), half, floats(y))
            x += 4 * head_dim


@fast_jit
def _normalise(x: F32, head_dim: int, norm: int, eps: Scalar, scale: Scalar, out: F32) -> None:
    """Sets out to the RMS norm of the head x with the weights at an address (0: to x itself), times scale."""
    if norm == 0:
        for d in range(head_dim):
            put(out, d, get(x, d) * scale)
        return
    squares, weight = np.float32(0), floats(norm)
    for d in range(head_dim):
        squares += get(x, d) * get(x, d)
    factor = scale / np.sqrt(squares / np.float32(head_dim) + eps)
    for d in range(head_dim):
        put(out, d, get(x, d) * factor * get(weight, d))


@fast_jit
def _rotate(cos: F32, sin: F32, half: int, x: F32) -> None:
    """Rotates the first 2 * half channels of the head x in place."""
    for d in range(half):
        x1, x2, c, s = get(x, d), get(x, half + d), get(cos, d), get(sin, d)
        put(x, d, x1 * c - x2 * s)
        put(x, half + d, x2 * c + x1 * s)


LANES = emit.LANES
VECTOR = emit.vector(emit.F32, LANES)
ELEMENT_WORK = 2  # multiply-adds
ZERO = np.float32(0)


def hadamard(x: F32, flips: F32, out: F32) -> None:
    """Fills out (A, n, D) with the transform of x (A, n, d)."""
    x = np.ascontiguousarray(x)
    _hadamard_rows(out.shape[0] * out.shape[1], ELEMENT_WORK * out.size, x, x.shape[2], flips, len(flips), out)


def hadamard_back(x: F32, flips: F32, out: F32) -> None:
    """Adds the inverse of `hadamard` of x (A, n, D) to out (A, n, d)."""
    x = np.array(x)  # is used up
    arguments = x, flips, len(flips), out, out.shape[2]
    _hadamard_back_rows(out.shape[0] * out.shape[1], ELEMENT_WORK * x.size, *arguments)


def project(x: F32, matrix: F32) -> F32:
    """Returns x (G, n, d) times the transpose of matrix (b, d): (G, n, b)."""
    result: F32 = x @ matrix.T
    return result


@exact_kernel
def _hadamard_rows(first: int, last: int, thread: int, arguments: int) -> None:
    x, n, flips, width, out = load_arguments(arguments, 5)
    for item in range(first, last):
        hadamard_row(floats(x), item * n, n, floats(flips), width, floats(out), item * width)


@exact_kernel
def _hadamard_back_rows(first: int, last: int, thread: int, arguments: int) -> None:
    x, flips, width, out, n = load_arguments(arguments, 5)
    for item in range(first, last):
        hadamard_back_row(floats(x), item * width, width, floats(flips), floats(out), item * n, n)


@jit
def hadamard_row(q: F32, query: int, n: int, flips: F32, width: int, x: F32, row: int) -> None:
    """Sets x[row:], (width,), to the Hadamard transform of q[query:], (n,), behind signs."""
    for d in range(n):
        put(x, row + d, get(q, query + d) * get(flips, d))
    for d in range(n, width):
        put(x, row + d, ZERO)
    _transform(x, row, width, np.float32(1 / np.sqrt(width)))


@jit
def hadamard_back_row(x: F32, row: int, width: int, flips: F32, out: F32, target: int, n: int) -> None:
    """Adds to out[target:], (n,), the inverse of `hadamard_row` of x[row:], (width,), which it overwrites."""
    _transform(x, row, width, np.float32(1 / np.sqrt(width)))
    for d in range(n):
        put(out, target + d, get(out, target + d) + get(x, row + d) * get(flips, d))


@jit
def rotate_row(
    q: F32, query: int, n: int, flips: F32, matrix: F32, is_hadamard: int, width: int, x: F32, row: int
) -> None:
    """Sets x[row:], (width,), to P q[query:], (n,); P: a Hadamard transform behind signs, or matrix (width, n)."""
    if is_hadamard:
        hadamard_row(q, query, n, flips, width, x, row)
    else:
        multiply_row(q, query, n, matrix, width, x, row)


@jit
def rotate_back_row(
    x: F32, row: int, width: int, flips: F32, inverse: F32, is_hadamard: int, out: F32, target: int, n: int
) -> None:
    """Adds to out[target:], (n,), the inverse of `rotate_row` of x[row:], (width,), which it overwrites."""
    if is_hadamard:
        hadamard_back_row(x, row, width, flips, out, target, n)
    else:
        for d in range(n):
            put(out, target + d, get(out, target + d) + product(x, row, inverse, d * width, width))


@jit
def multiply_row(q: F32, query: int, n: int, matrix: F32, n_rows: int, x: F32, row: int) -> None:
    """Sets x[row:], (n_rows,), to matrix (n_rows, n) times q[query:], (n,)."""
    for i in range(n_rows):
        put(x, row + i, product(q, query, matrix, i * n, n))


@fast_jit
def product(a: F32, i: int, b: F32, j: int, n: int) -> Scalar:
    """Returns the dot product of a[i:], (n,), and b[j:], (n,)."""
    total = ZERO
    for d in range(n):
        total += get(a, i + d) * get(b, j + d)
    return total


def rotation_args(rotation: Any) -> dict[str, int]:
    """Returns a codec's arguments of a rotation: its kind, and addresses of signs or matrix and inverse."""
    if rotation.flips is None:
        return {"is_hadamard": 0, "matrix": address_of(rotation.matrix), "inverse": address_of(rotation.inverse)}
    return {"is_hadamard": 1, "matrix": address_of(rotation.flips), "inverse": 0}


@jit
def _transform(x: F32, start: int, width: int, scale: Scalar) -> None:
    """Multiplies x[start:][:width] by scale * H in place."""
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
    """Replaces vectors a at x[i:] and b, ``distance`` elements behind it, by a + b and a - b."""

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
    """Multiplies the vector at x[i:] by scale * H."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        address = emit.address(context, b, x, args)
        value = hadamard_vector(b, emit.load(b, VECTOR, address))
        emit.store(b, b.fmul(emit.splat(b, args[2], LANES), value), address)
        return context.get_dummy_value()

    return types.none(x, types.intp, types.float32), build


def hadamard_vector(b: Any, x: Value) -> Value:
    """Returns H times a vector of float32, whose sums are made as `_transform` makes them."""
    n = distance = x.type.count
    while distance := distance // 2:
        other = emit.shuffle(b, x, [lane ^ distance for lane in range(n)])
        signs = ir.Constant(x.type, [-1.0 if lane & distance else 1.0 for lane in range(n)])
        x = emit.multiply_add(b, x, signs, other)
    return x
