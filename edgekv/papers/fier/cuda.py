"""The reader of FIER's index on a GPU: a bit per key element, of two levels per channel and group of tokens."""

from __future__ import annotations

import pathlib
from typing import Any

from edgekv.kernels.cuda.kernels import CudaCodec, Reader


def _read(index: Any) -> Reader:
    signs, levels, group = index.arrays["signs"], index.arrays["levels"], index.block
    store = (signs, levels), levels.shape[1] * group, signs.shape[2], (("GROUP", group),)
    file = pathlib.Path(__file__).with_name("keys")
    return Reader("RowKeys<FierRow>", file, *store, in_one_launch=False, tiles=2)


KERNELS = {"sign_index": CudaCodec(_read)}
