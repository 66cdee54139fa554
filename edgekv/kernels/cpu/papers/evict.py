"""A fixed number of slots per KV head: which token leaves, and what takes its place."""

import numpy as np

from edgekv.kernels.cpu.half import float_to_half
from edgekv.kernels.cpu.jit import Scalar, entry_jit, fast_jit, jit
from edgekv.kernels.cpu.launch import flat, run
from edgekv.kernels.cpu.scalar import get
from edgekv.types import F32, I32, I64, U16

ZERO = np.float32(0)
GONE, NEVER, WORD_BITS, LOW_WORD, LAST = np.array([-1, 2**31 - 1, 32, 2**32 - 1, 2**63 - 1], np.int64)
ZERO_BITS, LARGEST, INFINITE = np.array([0, 0x7F7FFFFF, 0x7F800000], np.int64)  # float32 bits


def store_token(k: F32, v: F32, position: int, slots: I64, keys: U16, values: U16, positions: I32) -> None:
    _store_token(np.ascontiguousarray(k), np.ascontiguousarray(v), position, slots, keys, values, positions)


def add_attention(p: F32, mass: F32, n: int, keep: float) -> None:
    run(_add_items, len(mass), p.shape[0] * p.shape[1] * n, *flat(p), p.shape[1], mass, n, keep)


def evict_lowest(mass: F32, positions: I32, n: int, visible: int, protected: int, slots: I64) -> None:
    args = mass, positions, n, visible, protected, slots
    run(_evict_items, len(mass), mass.shape[0] * n, *args)


@entry_jit
def _store_token(k: F32, v: F32, position: int, slots: I64, keys: U16, values: U16, positions: I32) -> None:
    for g in range(len(slots)):
        key, value = keys[g, slots[g]], values[g, slots[g]]
        for d in range(k.shape[1]):
            key[d] = float_to_half(k[g, d])
            value[d] = float_to_half(v[g, d])
        positions[g, slots[g]] = position


@fast_jit
def _add_items(
    first: int, last: int, p: F32, gap_g: int, gap_m: int, n_rows: int, mass: F32, n: int, keep: float
) -> None:
    factor = np.float32(keep)
    for g in range(first, last):
        total = mass[g, :n]
        for t in range(n):
            total[t] *= factor
        for m in range(n_rows):
            row = p[g * gap_g + m * gap_m :][:n]
            for t in range(n):
                total[t] += row[t]


@jit
def _evict_items(
    first: int, last: int, mass: F32, positions: I32, n: int, visible: int, protected: int, slots: I64
) -> None:
    bits, places, capacity = mass.view(np.int32).reshape(-1), positions.reshape(-1), mass.shape[1]
    for g in range(first, last):
        slots[g] = _lowest(bits, places, g * capacity, n, visible, protected)
        mass[g, slots[g]] = ZERO


@jit
def _lowest(bits: I32, places: I32, start: int, n: int, visible: int, protected: int) -> int:
    lowest = LAST
    for i in range(start, start + n):
        lowest = min(lowest, _order(bits, places, i, visible, protected))
    place = np.int32(lowest & LOW_WORD)
    for i in range(start, start + n):
        if get(places, i) == place:
            return i - start
    return 0


@jit
def _order(bits: I32, places: I32, i: int, visible: int, protected: int) -> Scalar:
    """One number for rank, then position: the bits of floats that are not negative sort like the floats."""
    place, rank = np.int64(get(places, i)), np.int64(get(bits, i))
    rank = min(rank, LARGEST) if ZERO_BITS <= rank <= INFINITE else ZERO_BITS
    rank = GONE if place < visible else rank
    rank = NEVER if place >= protected else rank
    return rank << WORD_BITS | place
