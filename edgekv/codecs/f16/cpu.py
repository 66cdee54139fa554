"""Loops over rows of float16, on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgekv.kernels.cpu.launch import exact_kernel
from edgekv.kernels.cpu.loops import (
    TOKENS_PER_CALL,
    CpuCodec,
    add_loop,
    address_of,
    floats,
    halves,
    load_arguments,
    put_loop,
    score_loop,
)
from edgekv.kernels.cpu.rows import add_rows, rows_at, score_rows
from edgekv.kernels.cpu.scalar import float_to_half, get, put
from edgekv.types import F32

_score_halves, _add_halves = score_rows(2), add_rows(2)


@score_loop
def _score(args: int, q: int, rows: int, g: int, t: int, n: int, s: int, stride: int, scratch: int) -> None:
    half, capacity, head_dim = rows_at(args)
    keys = half + 2 * (g * capacity + t) * head_dim
    _score_halves(q, rows, keys, head_dim, n, s, stride)


@add_loop
def _add(args: int, p: int, stride: int, rows: int, g: int, t: int, n: int, out: int, scratch: int) -> None:
    half, capacity, head_dim = rows_at(args)
    values = half + 2 * (g * capacity + t) * head_dim
    _add_halves(p, stride, rows, values, head_dim, n, out)


@put_loop
def _put(args: int, x: int, n: int, g: int, t0: int, scratch: int) -> None:
    half, capacity, head_dim = rows_at(args)
    target = (g * capacity + t0) * head_dim
    for i in range(n * head_dim):
        put(halves(half), target + i, float_to_half(get(floats(x), i)))


def _encode(codec: Any, x: F32, t0: int) -> None:
    n_groups, n, head_dim = x.shape
    arguments = np.ascontiguousarray(x), n, head_dim, codec.arrays["half"], codec.capacity, t0
    _encode_tokens(n_groups * n, x.size, *arguments)


@exact_kernel
def _encode_tokens(first: int, last: int, thread: int, arguments: int) -> None:
    x, n, head_dim, half, capacity, t0 = load_arguments(arguments, 6)
    for item in range(first, last):
        target = (item // n * capacity + t0 + item % n) * head_dim
        for d in range(head_dim):
            put(halves(half), target + d, float_to_half(get(floats(x), item * head_dim + d)))


KERNELS = {
    "f16": CpuCodec(
        lambda codec: (address_of(codec.arrays["half"]), codec.capacity, codec.head_dim),
        _score,
        _add,
        put=_put,
        encode=_encode,
        at_once=TOKENS_PER_CALL,
    )
}
