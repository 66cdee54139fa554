"""The CUDA backend: every function of `edgekv.kernels.contract` that the schemes it supports use."""

from __future__ import annotations

import functools
from typing import Any

from edgekv.kernels.cuda.append import AppendKernels
from edgekv.kernels.cuda.attend import AttendKernels
from edgekv.kernels.cuda.ints import IntKernels
from edgekv.kernels.cuda.loops import BACKEND
from edgekv.kernels.cuda.rope import PromptKernels, RopeKernels
from edgekv.kernels.registry import find_function


class CudaKernels(AttendKernels, AppendKernels, IntKernels, RopeKernels, PromptKernels):
    """Arrays are those of the driver; ranges (lo, hi, counts) stay NumPy's, on the host."""

    def __getattr__(self, name: str) -> Any:
        """The functions of the papers' schemes, whose first argument are these kernels."""
        return functools.partial(find_function(BACKEND, name), self)
