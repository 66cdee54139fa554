"""Uniform levels between given ends, in bit planes."""

from typing import Any

import numpy as np

from edgekv.kernels.reference.loops import Loops
from edgekv.types import F32, U8, U16


def encode_levels(x: F32, low: U16, step: U16, planes: U8, t0: int) -> None:
    n_bits, t1 = planes.shape[2], t0 + x.shape[1]
    least, size = _of_tokens(low, t0, t1), _of_tokens(step, t0, t1)
    with np.errstate(divide="ignore", invalid="ignore"):
        position = np.where(size > 0, (x - least) / size, 0)
    codes = np.clip(np.rint(position), 0, 2**n_bits - 1).astype(np.uint8)
    bits = codes[:, :, None] >> np.arange(n_bits, dtype=np.uint8)[:, None] & 1  # (G, n, n_bits, D)
    planes[:, t0:t1] = np.packbits(bits, axis=3, bitorder="little")


def levels(codec: Any, t0: int, t1: int) -> F32:
    """Tokens t0..t1 of a codec as numbers (G, t1 - t0, D): Visual 1-bit KV, equation 9."""
    planes, (low, step) = codec.arrays["planes"], (codec.arrays[name] for name in ("low", "step"))
    bits = np.unpackbits(planes[:, t0:t1], axis=3, count=codec.head_dim, bitorder="little")
    codes = (bits << np.arange(planes.shape[2], dtype=np.uint8)[:, None]).sum(axis=2, dtype=np.float32)
    if codec.group == "channel":  # low and step are (G, D)
        least, size = (ends.view(np.float16).astype(np.float32)[:, None] for ends in (low, step))
    else:
        least, size = (_of_tokens(ends, t0, t1) for ends in (low, step))
    values: F32 = least + codes * size
    return values


def _of_tokens(ends: U16, t0: int, t1: int) -> F32:
    """(1 or G, 1 or t1 - t0, 1) float32."""
    part = ends if ends.shape[1] == 1 else ends[:, t0:t1]
    numbers: F32 = part[..., None].view(np.float16).astype(np.float32)
    return numbers


LOOPS = {"levels": Loops(levels)}
