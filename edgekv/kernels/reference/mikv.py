"""Scores with keys that have a range per token, as KIVI's values have."""

import numpy as np

from edgekv.kernels.contract.evict import F32, U8, U16
from edgekv.kernels.reference.dense import scores_f32
from edgekv.kernels.reference.ints import unpack_codes


def scores_tokens(q: F32, codes: U8, step: U16, low: U16, t0: int, t1: int, s: F32, s0: int) -> None:
    block, tokens = codes.shape[3], np.arange(t0, t1)
    packed = codes[:, tokens // block, :, tokens % block].transpose(1, 0, 2)  # (G, T, n_bytes)
    size, least = (ends[:, t0:t1, None].copy().view(np.float16) for ends in (step, low))
    keys = unpack_codes(packed, q.shape[2]) * size + least
    scores_f32(q, keys, 0, t1 - t0, s, s0)
