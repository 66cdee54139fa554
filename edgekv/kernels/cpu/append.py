"""Keys and values of a few new tokens into their stores, in one call where both are stored token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from edgekv.kernels.cpu import launch
from edgekv.kernels.cpu.codecs import KEYS, VALUES
from edgekv.kernels.cpu.jit import Args, jit, parallel_jit
from edgekv.kernels.cpu.loops import address_of, aligned_size, call_put, scratch_memory, store_numbers
from edgekv.types import F32

FEW_TOKENS = 8  # more are encoded codec by codec


def append(keys: Any, values: Any, k: F32, v: F32, t0: int) -> None:
    key_loops, value_loops = KEYS.get(keys.kind), VALUES.get(values.kind)
    put_key, put_value = key_loops and key_loops.put, value_loops and value_loops.put
    if not (key_loops and value_loops and put_key and put_value) or k.shape[1] > FEW_TOKENS:
        keys.encode(k, t0)
        values.encode(v, t0)
        return
    k, v = np.ascontiguousarray(k), np.ascontiguousarray(v)
    n_groups, n, head_dim = k.shape
    n_bytes = aligned_size(max(key_loops.put_scratch(keys), value_loops.put_scratch(values)))
    stores = store_numbers(key_loops, keys), store_numbers(value_loops, values)
    args = (
        *(address_of(stores[0]), address_of(stores[1]), put_key.address, put_value.address),
        *(address_of(k), address_of(v), n, head_dim, t0, scratch_memory("append", n_groups * n_bytes), n_bytes),
    )
    launch.run(_append_heads, _append_parallel, n_groups, k.size * max(1, n_bytes), args)


@jit
def _append_heads(first: int, last: int, args: Args) -> None:
    key_store, value_store, put_key, put_value, k, v, n, head_dim, t0, memory, n_bytes = args
    for g in range(first, last):
        row, scratch = 4 * g * n * head_dim, memory + g * n_bytes
        call_put(put_key, key_store, k + row, n, g, t0, scratch)
        call_put(put_value, value_store, v + row, n, g, t0, scratch)


@parallel_jit
def _append_parallel(n_parts: int, n_groups: int, args: Args) -> None:
    for part in prange(n_parts):
        _append_heads(n_groups * part // n_parts, n_groups * (part + 1) // n_parts, args)
