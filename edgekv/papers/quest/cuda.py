"""The reader of Quest's index on a GPU: the largest and the smallest key of a page in each channel."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgekv.kernels.cuda.driver import Array
from edgekv.kernels.cuda.kernels import CudaCodec, CudaKernels, Queries, Reader


def _read(index: Any) -> Reader:
    bounds = index.arrays["bounds"]
    return Reader("RowKeys<Numbers<u16>>", "rows", (bounds,), bounds.shape[1], bounds.shape[2])


def _signed_parts(cuda: CudaKernels, index: Any, q: Array) -> Queries:
    """Returns the positive part of q, which meets a page's largest keys, and the negative part beside it."""
    return Queries(np.concatenate([np.maximum(q, 0), np.minimum(q, 0)], axis=2))


KERNELS = {"page_index": CudaCodec(_read, queries=_signed_parts)}
