"""Arrays on the host, aligned to cache lines, and helpers for arrays on the host or a device.

Code over caches works on a device's arrays through NumPy's own protocols (NEP 13, 18 and 35): operators and most
functions follow their arguments, temporaries are made with `np.empty_like(x, shape=...)`, constants brought over
with `np.asarray(constant, like=x)`. `empty` and `zeros` make this module a `Memory`.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

A = TypeVar("A", bound=Any)


class Memory(Protocol):
    """An allocator of stores and scratch: `edgekv.kernels.arrays`, or a device."""

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Returns an array with undefined contents."""

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Returns an array filled with zeros."""


def contiguous(x: A) -> A:
    """Returns x itself if it is C-contiguous, else a copy that is."""
    result: A = x if x.flags.c_contiguous else x.copy()
    return result


def to_host(x: Any) -> npt.NDArray[Any]:
    """Returns x itself if it is a NumPy array, else a copy of the device's array."""
    return x if isinstance(x, np.ndarray) else x.get()


CACHE_LINE_BYTES = 64


def empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Returns an array with undefined contents, not aligned."""
    return np.empty(shape, dtype)


def zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Returns zeros, C-contiguous and aligned to 64 bytes; untouched pages take no memory."""
    dtype = np.dtype(dtype)
    n_bytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(n_bytes + CACHE_LINE_BYTES, np.uint8)
    start = -raw.ctypes.data % CACHE_LINE_BYTES
    return raw[start : start + n_bytes].view(dtype).reshape(shape)
