"""The reference backend: each kernel as its formula, in NumPy. Slow, and the oracle of the others."""

from typing import Any

from edgekv.kernels.interface import FUNCTIONS, find_function
from edgekv.kernels.reference.attend import append, attend, encode, scores, softmax
from edgekv.kernels.reference.rope import hadamard, hadamard_back, project, split_rope

backend = "reference"

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
