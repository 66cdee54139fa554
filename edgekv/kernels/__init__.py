"""The inner loops of attention over compressed caches, in interchangeable backends.

`spec.Kernels` states what each function does; `numpy_` is its plain reference, `numba_` the fast one.
"""

from typing import cast

from edgekv.kernels.spec import BLOCK, Kernels

__all__ = ["BLOCK", "Kernels", "numba_kernels", "numpy_kernels"]


def numba_kernels(threads: int | None = None) -> Kernels:
    """The fast backend on `threads` threads (None: all cores), a setting of the whole process.

    Numba is imported here, and each kernel compiled at its first call ever on a machine.
    """
    from edgekv.kernels import numba_
    from edgekv.kernels.threads import configure

    configure(threads)
    return cast(Kernels, numba_)


def numpy_kernels(threads: int | None = None) -> Kernels:
    """The reference backend; its thread count is that of NumPy's matrix products."""
    from edgekv.kernels import numpy_

    return cast(Kernels, numpy_)
