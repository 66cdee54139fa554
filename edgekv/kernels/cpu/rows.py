"""Keys and values held as numbers, float16 bits or float32: one source for both, compiled for each."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.compile import Args, fast_jit, jit
from edgekv.kernels.cpu.launch import run
from edgekv.kernels.cpu.loops import (
    AT_ONCE,
    Loops,
    add_loop,
    address_of,
    floats,
    halves,
    numbers,
    put_loop,
    score_loop,
)
from edgekv.kernels.cpu.row_products import add_rows, score_rows
from edgekv.kernels.cpu.scalar import as_float, float_to_half, get, put
from edgekv.types import F32, I8, U16

WIDTH = emit.REGISTER


def encode_f16(x: F32, store: U16, t0: int) -> None:
    args = np.ascontiguousarray(x), store, t0
    run(_encode_tokens, x.shape[0] * x.shape[1], x.size, args)


def project(x: F32, matrix: F32) -> F32:
    result: F32 = x @ matrix.T
    return result


def _half_store(codec: Any) -> tuple[int, ...]:
    return address_of(codec.arrays["half"]), codec.capacity, codec.head_dim


def _single_store(codec: Any) -> tuple[int, ...]:
    return address_of(codec.arrays["single"]), codec.capacity, codec.head_dim


_score_halves, score_singles = score_rows(2), score_rows(4)
_add_halves, add_singles = add_rows(2), add_rows(4)


@score_loop
def _score_f16(store: int, q: int, rows: int, g: int, t: int, n: int, s: int, gap: int, scratch: int) -> None:
    half, capacity, head_dim = _numbers(store)
    keys = half + 2 * (g * capacity + t) * head_dim
    _score_halves(q, rows, keys, head_dim, n, s, gap)
    if head_dim % WIDTH:
        score_rest(floats(q), rows, halves(keys), head_dim, n, floats(s), gap)


@score_loop
def _score_f32(store: int, q: int, rows: int, g: int, t: int, n: int, s: int, gap: int, scratch: int) -> None:
    single, capacity, head_dim = _numbers(store)
    keys = single + 4 * (g * capacity + t) * head_dim
    score_singles(q, rows, keys, head_dim, n, s, gap)
    if head_dim % WIDTH:
        score_rest(floats(q), rows, floats(keys), head_dim, n, floats(s), gap)


@add_loop
def _add_f16(store: int, p: int, gap: int, rows: int, g: int, t: int, n: int, out: int, scratch: int) -> None:
    half, capacity, head_dim = _numbers(store)
    values = half + 2 * (g * capacity + t) * head_dim
    _add_halves(p, gap, rows, values, head_dim, n, out)
    if head_dim % WIDTH:
        add_rest(floats(p), gap, rows, halves(values), head_dim, n, floats(out))


@add_loop
def _add_f32(store: int, p: int, gap: int, rows: int, g: int, t: int, n: int, out: int, scratch: int) -> None:
    single, capacity, head_dim = _numbers(store)
    values = single + 4 * (g * capacity + t) * head_dim
    add_singles(p, gap, rows, values, head_dim, n, out)
    if head_dim % WIDTH:
        add_rest(floats(p), gap, rows, floats(values), head_dim, n, floats(out))


@jit
def _numbers(store: int) -> tuple[int, int, int]:
    x = numbers(store)
    return get(x, 0), get(x, 1), get(x, 2)


@put_loop
def _put_f16(store: int, x: int, n: int, g: int, t0: int, scratch: int) -> None:
    half, capacity, head_dim = _numbers(store)
    target = (g * capacity + t0) * head_dim
    for i in range(n * head_dim):
        put(halves(half), target + i, float_to_half(get(floats(x), i)))


@put_loop
def _put_f32(store: int, x: int, n: int, g: int, t0: int, scratch: int) -> None:
    single, capacity, head_dim = _numbers(store)
    target = (g * capacity + t0) * head_dim
    for i in range(n * head_dim):
        put(floats(single), target + i, get(floats(x), i))


def _encode_half(codec: Any, x: F32, t0: int) -> None:
    encode_f16(x, codec.arrays["half"], t0)


def _encode_single(codec: Any, x: F32, t0: int) -> None:
    codec.arrays["single"][:, t0 : t0 + x.shape[1]] = x


LOOPS = {
    "f16": Loops(_half_store, _score_f16, _add_f16, put=_put_f16, encode=_encode_half, at_once=AT_ONCE),
    "f32": Loops(_single_store, _score_f32, _add_f32, put=_put_f32, encode=_encode_single, at_once=AT_ONCE),
}


@jit
def _encode_tokens(first: int, last: int, args: Args) -> None:
    x, store, t0 = args
    (_, n_tokens, head_dim), capacity = x.shape, store.shape[1]
    x, store = x.reshape(-1), store.reshape(-1)
    for item in range(first, last):
        target = (item // n_tokens * capacity + t0 + item % n_tokens) * head_dim
        for d in range(head_dim):
            put(store, target + d, float_to_half(get(x, item * head_dim + d)))


@fast_jit
def score_rest(q: F32, rows: int, keys: U16 | I8 | F32, head_dim: int, n: int, s: F32, gap: int) -> None:
    """Adds the channels behind the last whole vector."""
    for m in range(rows):
        for t in range(n):
            score = get(s, m * gap + t)
            for d in range(head_dim // WIDTH * WIDTH, head_dim):
                score += get(q, m * head_dim + d) * as_float(get(keys, t * head_dim + d))
            put(s, m * gap + t, score)


@fast_jit
def add_rest(p: F32, gap: int, rows: int, values: U16 | I8 | F32, head_dim: int, n: int, out: F32) -> None:
    """Adds the channels behind the last whole vector."""
    for m in range(rows):
        for d in range(head_dim // WIDTH * WIDTH, head_dim):
            total = get(out, m * head_dim + d)
            for t in range(n):
                total += get(p, m * gap + t) * as_float(get(values, t * head_dim + d))
            put(out, m * head_dim + d, total)
