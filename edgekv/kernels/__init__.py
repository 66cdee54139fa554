"""The inner loops of attention over compressed caches, in interchangeable backends.

`interface` names the functions; `reference` (NumPy) is their plain meaning, `cpu` (Numba) is fast,
`cuda` (CuPy) runs on a GPU. A codec's class names the module that reads it (`edgekv.codecs`).
"""

from typing import cast

from edgekv.kernels.interface import BLOCK, Kernels

__all__ = ["BLOCK", "Kernels", "numba_kernels", "numpy_kernels"]


def numba_kernels(threads: int | None = None) -> Kernels:
    """Returns the fast backend on ``threads`` threads (None: all cores), a setting of the whole process.

    Imports Numba. Each kernel is compiled at its first call ever on a machine.
    """
    from edgekv.kernels import cpu
    from edgekv.kernels.threads import configure

    configure(threads)
    return cast(Kernels, cpu)


def numpy_kernels(threads: int | None = None) -> Kernels:
    """Returns the reference backend; its threads are those of NumPy's matrix products."""
    from edgekv.kernels import reference

    return cast(Kernels, reference)
