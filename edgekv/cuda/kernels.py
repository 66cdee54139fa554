"""The CUDA backend: every function of `edgekv.kernels.spec` that the schemes it supports use."""

from __future__ import annotations

from edgekv.cuda.codes import CodeKernels
from edgekv.cuda.dense import DenseKernels
from edgekv.cuda.ints import IntKernels
from edgekv.cuda.planes import PlaneKernels
from edgekv.cuda.retrieval import RetrievalKernels
from edgekv.cuda.signs import SignKernels


class CudaKernels(DenseKernels, SignKernels, IntKernels, PlaneKernels, CodeKernels, RetrievalKernels):
    """Arrays are those of the driver; ranges (lo, hi, counts) stay NumPy's, on the host."""
