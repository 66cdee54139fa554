"""Quest's index: the largest and the smallest key of a page, channel by channel."""

import numpy as np

from edgekv.types import U16


def encode_pages(keys: U16, page: int, bounds: U16, b0: int, b1: int) -> None:
    n_kv_heads, _, head_dim = keys.shape
    x = keys[:, b0 * page : b1 * page].view(np.float16).reshape(n_kv_heads, b1 - b0, page, head_dim)
    bounds[:, b0:b1, :head_dim] = x.max(axis=2).view(np.uint16)
    bounds[:, b0:b1, head_dim:] = x.min(axis=2).view(np.uint16)
