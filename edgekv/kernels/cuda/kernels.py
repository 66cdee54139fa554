"""The CUDA backend: every function of `edgekv.kernels.contract` that the schemes it supports use."""

from __future__ import annotations

from edgekv.kernels.cuda.append import AppendKernels
from edgekv.kernels.cuda.attend import AttendKernels
from edgekv.kernels.cuda.ints import IntKernels
from edgekv.kernels.cuda.papers.huffman import HuffmanKernels
from edgekv.kernels.cuda.prompt import PromptKernels
from edgekv.kernels.cuda.rope import RopeKernels


class CudaKernels(AttendKernels, AppendKernels, IntKernels, HuffmanKernels, RopeKernels, PromptKernels):
    """Arrays are those of the driver; ranges (lo, hi, counts) stay NumPy's, on the host."""
