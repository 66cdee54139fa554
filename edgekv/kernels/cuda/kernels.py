"""The CUDA backend: every function of `edgekv.kernels.contract` that the schemes it supports use."""

from __future__ import annotations

from edgekv.kernels.cuda.codes import CodeKernels
from edgekv.kernels.cuda.dense import DenseKernels
from edgekv.kernels.cuda.ints import IntKernels
from edgekv.kernels.cuda.planes import PlaneKernels
from edgekv.kernels.cuda.retrieval import RetrievalKernels
from edgekv.kernels.cuda.signs import SignKernels


class CudaKernels(DenseKernels, SignKernels, IntKernels, PlaneKernels, CodeKernels, RetrievalKernels):
    """Arrays are those of the driver; ranges (lo, hi, counts) stay NumPy's, on the host."""
