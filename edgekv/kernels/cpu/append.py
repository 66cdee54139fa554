"""Keys and values of a few new tokens into their stores, in one call where both are stored token by token."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgekv.kernels.cpu import launch
from edgekv.kernels.cpu.compile import Args, jit
from edgekv.kernels.cpu.launch import call_put
from edgekv.kernels.cpu.loops import address_of, aligned_size, bound, loops_of, scratch_memory
from edgekv.kernels.registry import find_loops
from edgekv.types import F32

FEW_TOKENS = 8  # more are encoded codec by codec
PART = 64  # tokens of a head that are encoded together


def append(keys: Any, values: Any, k: F32, v: F32, t0: int) -> None:
    if k.shape[1] > FEW_TOKENS or not loops_of(keys).put or not loops_of(values).put:
        keys.encode(k, t0)
        values.encode(v, t0)
        return
    k, v = np.ascontiguousarray(k), np.ascontiguousarray(v)
    n_groups, n, head_dim = k.shape
    one, other = bound(keys), bound(values)
    put_key, put_value = one.loops.put, other.loops.put
    assert put_key is not None
    assert put_value is not None
    n_bytes = aligned_size(max(one.loops.put_scratch(keys), other.loops.put_scratch(values)))
    args = (
        *(address_of(one.numbers), address_of(other.numbers), put_key.address, put_value.address),
        *(address_of(k), address_of(v), n, head_dim, t0, scratch_memory("append", n_groups * n_bytes), n_bytes),
    )
    launch.run(_append_heads, n_groups, k.size * max(1, n_bytes), args)


def encode(codec: Any, x: F32, t0: int) -> None:
    loops = loops_of(codec)
    if loops.encode:
        loops.encode(codec, x, t0)
    elif loops.put:
        n_groups, n, head_dim = x.shape
        n_bytes, n_parts = aligned_size(loops.put_scratch(codec)), -(-n // PART)
        memory = scratch_memory("append", n_groups * n_parts * n_bytes)
        x = np.ascontiguousarray(x)
        store = address_of(bound(codec).numbers)
        args = store, loops.put.address, address_of(x), n, head_dim, t0, memory, n_bytes
        launch.run(_encode_parts, n_groups * n_parts, x.size, args)
    else:
        find_loops("reference", codec).encode(codec, x, t0)  # in NumPy


@jit
def _encode_parts(first: int, last: int, args: Args) -> None:
    store, put, x, n, head_dim, t0, memory, n_bytes = args
    n_parts = (n + PART - 1) // PART
    for item in range(first, last):
        g, t = item // n_parts, item % n_parts * PART
        row = x + 4 * (g * n + t) * head_dim
        call_put(put, store, row, min(PART, n - t), g, t0 + t, memory + item * n_bytes)


@jit
def _append_heads(first: int, last: int, args: Args) -> None:
    key_store, value_store, put_key, put_value, k, v, n, head_dim, t0, memory, n_bytes = args
    for g in range(first, last):
        row, scratch = 4 * g * n * head_dim, memory + g * n_bytes
        call_put(put_key, key_store, k + row, n, g, t0, scratch)
        call_put(put_value, value_store, v + row, n, g, t0, scratch)
