"""Arrays that may lie on a device: what NumPy's dispatch to them leaves open.

Code over caches works on a device's arrays through NumPy's own protocols (NEP 13, 18 and 35): operators and most
functions follow their arguments, temporaries are made with `np.empty_like(x, shape=...)`, constants brought over
with `np.asarray(constant, like=x)`.
"""

from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

A = TypeVar("A", bound=Any)


class Memory(Protocol):
    """Where stores and scratch are taken from: `edgekv.kernels.aligned`, or a device."""

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """An array, contents undefined."""

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """An array filled with zeros."""


def contiguous(x: A) -> A:
    """x itself if it is C-contiguous, else a copy that is."""
    result: A = x if x.flags.c_contiguous else x.copy()
    return result


def to_host(x: Any) -> npt.NDArray[Any]:
    """x as a NumPy array: itself, or a copy of a device's."""
    return x if isinstance(x, np.ndarray) else x.get()
