"""Keys that have a range per token, as KIVI's values have."""

from typing import Any

import numpy as np

from edgekv.kernels.reference.ints import unpack_codes
from edgekv.kernels.reference.loops import Loops
from edgekv.types import F32


def token_keys(codec: Any, t0: int, t1: int) -> F32:
    """Over the balance, by which queries are divided."""
    codes, tokens = codec.arrays["codes"], np.arange(t0, t1)
    block = codes.shape[3]
    packed = codes[:, tokens // block, :, tokens % block].transpose(1, 0, 2)  # (G, T, n_bytes)
    step, low = (codec.arrays[name][:, t0:t1, None].copy().view(np.float16) for name in ("step", "low"))
    keys: F32 = (low + step * unpack_codes(packed, codec.head_dim)) / codec.balance[:, None]
    return keys


LOOPS = {"token_keys": Loops(token_keys)}
