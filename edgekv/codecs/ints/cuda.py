"""Integers of 8 (or 4) bits with a scale per token on a GPU: their encoder, and readers of any integers."""

from __future__ import annotations

import functools
from typing import Any

from edgekv.kernels.cuda.driver import Array, Launch, counter
from edgekv.kernels.cuda.kernels import ENCODE, CudaCodec, CudaKernels, Reader, per_head


def read_integers(rows: str, codes: Array, scales: tuple[Array, ...], width: int, meaning: str) -> Reader:
    """Returns the reader of integers in codes (G, capacity, bytes).

    rows: RowKeys or RowValues. scales: arrays (G, capacity). meaning: what codes and scales stand for, as Integers
    in rows.cu has it.
    """
    bits, arrays = 8 * codes.shape[2] // width, (codes, *scales)
    return Reader(
        f"{rows}<Integers<{bits}, {meaning}>>", "rows", arrays, codes.shape[1], width, tiles=2 if bits < 4 else 1
    )


def _encode(cuda: CudaKernels, codec: Any, x: Array, t0: int) -> None:
    n_kv_heads, n, d = x.shape
    codes, scale = codec.arrays["codes"], codec.arrays["scale"]
    x, stride = per_head(x)
    launch = Launch(ENCODE, "encode_sym", (n, n_kv_heads), 32)
    bits, capacity = 8 * codes.shape[2] // d, scale.shape[1]
    cuda.driver.launch(launch, x, stride, d, bits, codes, scale, capacity, counter(cuda.driver, t0))


def _read(rows: str, codec: Any) -> Reader:
    codes, scale = codec.arrays["codes"], codec.arrays["scale"]
    return read_integers(rows, codes, (scale,), codec.head_dim, "FROM_MIDDLE")


READERS = functools.partial(_read, "RowKeys"), functools.partial(_read, "RowValues")
KERNELS = {"int8": CudaCodec(*READERS, encode=_encode, capturable=True)}
