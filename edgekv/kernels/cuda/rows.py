"""Numbers as they are: encoders in half and single precision, products with small matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgekv.kernels.cuda.driver import Array, Launch, Program, place
from edgekv.kernels.cuda.loops import THREADS, Backend, Loops, Reader, per_head

ENCODE = Program(("exact",), exact=True)


class RowKernels(Backend):
    """Encoders and products of `edgekv.kernels.interface` for numbers as they are."""

    def encode_f16(self, x: Array, store: Array, t0: int) -> None:
        """Stores x (G, n, D) in float16, from token t0 of store (G, capacity, D) on."""
        encode_numbers(self, "encode_f16", x, store, t0)


def encode_numbers(tools: Backend, kernel: str, x: Array, store: Array, t0: int) -> None:
    """x (G, n, D) into store (G, capacity, D) from token t0 on, by ``kernel``: encode_f16 or encode_f32."""
    n_kv_heads, n, d = x.shape
    if n:  # SinkWindowCache may have nothing left over
        x, stride = per_head(x)
        launch = Launch(ENCODE, kernel, (n, n_kv_heads), THREADS)
        tools.driver.launch(launch, x, stride, d, store, store.shape[1], *place(tools.driver, t0))


def _loops(element: str, array: str, kernel: str) -> Loops:
    """Of keys and values in an array of numbers (G, capacity, D)."""

    def read(name: str) -> Callable[[Any], Reader]:
        def make(codec: Any) -> Reader:
            rows = codec.arrays[array]
            return Reader(f"{name}<Numbers<{element}>>", "rows", (rows,), rows.shape[1], rows.shape[2])

        return make

    def encode(tools: Backend, codec: Any, x: Array, t0: int) -> None:
        encode_numbers(tools, kernel, x, codec.arrays[array], t0)

    return Loops(read("RowKeys"), read("RowValues"), encode=encode, placed=True)


LOOPS = {"f16": _loops("u16", "half", "encode_f16"), "f32": _loops("float", "single", "encode_f32")}
