"""Quest's index: the largest and the smallest key of a page, channel by channel."""

from typing import Any

import numpy as np

from edgekv.kernels.reference.loops import Loops
from edgekv.types import F32


def _scores(index: Any, q: F32, t0: int, t1: int, s: F32) -> None:
    """Per page the sum over channels of the larger product: the positive part of q meets the largest key."""
    parts = np.concatenate([np.maximum(q, 0), np.minimum(q, 0)], axis=2)
    bounds = index.arrays["bounds"][:, t0:t1].view(np.float16).astype(np.float32)
    s[...] = parts @ bounds.transpose(0, 2, 1)


LOOPS = {"page_index": Loops(scores=_scores)}
