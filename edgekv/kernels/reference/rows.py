"""Keys and values held as numbers: float16 bits or float32."""

from typing import Any

import numpy as np

from edgekv.kernels.reference.loops import Loops
from edgekv.types import F32, U16


def encode_f16(x: F32, store: U16, t0: int) -> None:
    """Stores x (G, n, D) at tokens t0.. of store (G, cap, D), rounded to nearest even."""
    store[:, t0 : t0 + x.shape[1]] = x.astype(np.float16).view(np.uint16)


def encode_f32(x: F32, store: F32, t0: int) -> None:
    """Stores x (G, n, D) at tokens t0.. of store (G, cap, D)."""
    store[:, t0 : t0 + x.shape[1]] = x


def project(x: F32, matrix: F32) -> F32:
    """x (G, n, d) times the transpose of matrix (b, d): (G, n, b)."""
    result: F32 = x @ matrix.T
    return result


def _widen(bits: U16) -> F32:
    return bits.view(np.float16).astype(np.float32)


def _f16(codec: Any, t0: int, t1: int) -> F32:
    return _widen(codec.arrays["half"][:, t0:t1])


def _f32(codec: Any, t0: int, t1: int) -> F32:
    numbers: F32 = codec.arrays["single"][:, t0:t1]
    return numbers


LOOPS = {
    "f16": Loops(_f16, encode=lambda codec, x, t0: encode_f16(x, codec.arrays["half"], t0)),
    "f32": Loops(_f32, encode=lambda codec, x, t0: encode_f32(x, codec.arrays["single"], t0)),
}
