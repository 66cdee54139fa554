"""Quest's index: the largest and the smallest key of a page, channel by channel."""

from typing import Any

import numpy as np

from edgekv.kernels.reference.loops import Loops
from edgekv.kernels.reference.rows import scores_f16
from edgekv.types import F32, U16


def encode_pages(keys: U16, page: int, bounds: U16, b0: int, b1: int) -> None:
    n_kv_heads, _, head_dim = keys.shape
    x = keys[:, b0 * page : b1 * page].view(np.float16).reshape(n_kv_heads, b1 - b0, page, head_dim)
    bounds[:, b0:b1, :head_dim] = x.max(axis=2).view(np.uint16)
    bounds[:, b0:b1, head_dim:] = x.min(axis=2).view(np.uint16)


def _scores(index: Any, q: F32, t0: int, t1: int, s: F32) -> None:
    """Per page the sum over channels of the larger product: the positive part of q meets the largest key."""
    parts = np.concatenate([np.maximum(q, 0), np.minimum(q, 0)], axis=2)
    scores_f16(parts, index.arrays["bounds"], t0, t1, s, 0)


LOOPS = {"page_index": Loops(scores=_scores)}
