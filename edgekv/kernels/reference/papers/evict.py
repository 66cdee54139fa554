"""A fixed number of slots per KV head: which token leaves, and what takes its place."""

import numpy as np

from edgekv.kernels.contract.papers.evict import ranks
from edgekv.types import F32, I32, I64, U16


def store_token(k: F32, v: F32, position: int, slots: I64, keys: U16, values: U16, positions: I32) -> None:
    heads = np.arange(len(slots))
    keys[heads, slots] = k.astype(np.float16).view(np.uint16)
    values[heads, slots] = v.astype(np.float16).view(np.uint16)
    positions[heads, slots] = position


def add_attention(p: F32, mass: F32, n: int, keep: float) -> None:
    mass[:, :n] = np.float32(keep) * mass[:, :n] + p[:, :, :n].sum(axis=1)


def evict_lowest(mass: F32, positions: I32, n: int, visible: int, protected: int, slots: I64) -> None:
    position = positions[:, :n]
    rank = ranks(mass[:, :n], position, visible, protected)
    lowest = rank == rank.min(axis=1, keepdims=True)
    slots[:] = np.where(lowest, position, np.iinfo(np.int32).max).argmin(axis=1)
    mass[np.arange(len(slots)), slots] = 0
