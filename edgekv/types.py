"""Types: paths, arrays by their elements, progress callbacks, and numbers of threads."""

import os
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Meta

Path = Annotated[str | os.PathLike[str], Meta(pattern=r"\A[^\0]+\Z", description="a path")]

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I8 = npt.NDArray[np.int8]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

TaskProgress = Callable[[str, int, int], None]
"""A callback of long work: its name ("quantizing"), how much of it is done, and the total."""
LayerProgress = Callable[[int, int], None]
"""A callback of reading a prompt: the layers that are done, and all layers."""


class Threads(NamedTuple):
    """The numbers of threads of weight products: for a token, and for a prompt (at least as many)."""

    decode: int
    prompt: int
