"""H1B-KV's values on a GPU: four bits with a scale and a zero point per token."""

from __future__ import annotations

import pathlib
from typing import Any

from edgekv.codecs.ints import cuda as ints
from edgekv.kernels.cuda.driver import Array, Launch, Program, counter
from edgekv.kernels.cuda.kernels import CudaCodec, CudaKernels, Reader, per_head

FOLDER = pathlib.Path(__file__).parent
ENCODE = Program(("exact", FOLDER / "encode"), exact=True)


def encode_int4(cuda: CudaKernels, x: Array, codes: Array, delta: Array, zero: Array, t0: int) -> None:
    """Stores x (G, n, D) from token t0 on, as `edgekv.papers.int4.Int4.encode` does."""
    n_kv_heads, n, d = x.shape
    x, stride = per_head(x)
    launch = Launch(ENCODE, "encode_int4", (n, n_kv_heads), 32)
    cuda.driver.launch(launch, x, stride, d, codes, delta, zero, delta.shape[1], counter(cuda.driver, t0))


def _encode(cuda: CudaKernels, codec: Any, x: Array, t0: int) -> None:
    encode_int4(cuda, x, codec.arrays["codes"], codec.arrays["delta"], codec.arrays["zero"], t0)


def _read(codec: Any) -> Reader:
    a = codec.arrays
    return ints.read_integers("RowValues", a["codes"], (a["delta"], a["zero"]), codec.head_dim, "FROM_ZERO")


KERNELS = {"int4": CudaCodec(values=_read, encode=_encode, capturable=True), "symmetric4": ints.KERNELS["int8"]}
