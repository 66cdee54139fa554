"""Half and single precision on a GPU: encoders and readers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgekv.kernels.cuda.driver import Array, Launch, counter
from edgekv.kernels.cuda.kernels import ENCODE, THREADS, CudaCodec, CudaKernels, Reader, per_head


def _kernels(element: str, array: str, halves: int) -> CudaCodec:
    """Returns the kernels of keys and values in an array (G, capacity, D) of a C++ type."""

    def read(name: str) -> Callable[[Any], Reader]:
        def make(codec: Any) -> Reader:
            rows = codec.arrays[array]
            return Reader(f"{name}<Numbers<{element}>>", "rows", (rows,), rows.shape[1], rows.shape[2])

        return make

    def encode(cuda: CudaKernels, codec: Any, x: Array, t0: int) -> None:
        (n_kv_heads, n, d), store = x.shape, codec.arrays[array]
        if n:  # SinkWindowCache may have nothing left over
            x, stride = per_head(x)
            launch = Launch(ENCODE, "encode", (n, n_kv_heads), THREADS)
            cuda.driver.launch(launch, x, stride, d, store, halves, store.shape[1], counter(cuda.driver, t0))

    return CudaCodec(read("RowKeys"), read("RowValues"), encode=encode, capturable=True)


KERNELS = {"f16": _kernels("u16", "half", 1), "f32": _kernels("float", "single", 0)}
