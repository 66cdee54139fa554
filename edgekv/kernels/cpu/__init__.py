"""The fast backend: Numba on all threads of a CPU, with explicit vectors where LLVM would not find them."""

from typing import Any

from edgekv.kernels.cpu.attend import append, attend, encode, scores
from edgekv.kernels.cpu.rope import hadamard, hadamard_back, project, split_rope
from edgekv.kernels.cpu.softmax import softmax
from edgekv.kernels.interface import FUNCTIONS, find_function

backend = "cpu"

__all__ = [
    "append",
    "attend",
    "backend",
    "encode",
    "hadamard",
    "hadamard_back",
    "project",
    "scores",
    "softmax",
    "split_rope",
    *FUNCTIONS,
]


def __getattr__(name: str) -> Any:
    """The functions that few models call: their file is imported when one is first called."""
    return find_function(__name__, name)
