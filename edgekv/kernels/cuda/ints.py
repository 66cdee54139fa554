"""Integers of 8, 4 or 2 bits with linear scales: who reads them, and the symmetric ones' encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgekv.kernels.cuda.counter import place
from edgekv.kernels.cuda.driver import Array, Launch
from edgekv.kernels.cuda.loops import Backend, Loops, Reader, per_head
from edgekv.kernels.cuda.rows import ENCODE


def column_keys(names: tuple[str, ...], scales: str) -> Callable[[Any], Reader]:
    """Reads keys token by token: codes (G, capacity, bytes), the first of the arrays.

    ``scales`` says what the others are: see columns.cu.
    """

    def read(codec: Any) -> Reader:
        arrays = tuple(codec.arrays[name] for name in names)
        _, capacity, n_bytes = arrays[0].shape
        block = 32 if scales == "SCALE_PER_TOKEN" else capacity // arrays[1].shape[1]
        bits, macros = 8 * n_bytes // codec.head_dim, (("KEY_SCALES", scales), ("KEY_BLOCK", block))
        tiles = max(1, 4 // bits)
        return Reader(f"ColumnKeys<{bits}>", "columns", arrays, capacity, codec.head_dim, macros, tiles=tiles)

    return read


def byte_values(codes: Array, scales: tuple[Array, ...], width: int, meaning: str, tiles: int = 0) -> Reader:
    """Reads values token by token: codes (G, capacity, bytes).

    ``meaning`` says what the codes and ``scales`` stand for: see byte_values.cu.
    """
    bits, macros = 8 * codes.shape[2] // width, (("VALUE_SCALES", meaning),)
    arrays, tiles = (codes, *scales), tiles or max(1, 4 // bits)
    return Reader(f"ByteValues<{bits}>", "byte_values", arrays, codes.shape[1], width, macros, tiles=tiles)


class IntKernels(Backend):
    """`edgekv.kernels.contract.ints` on the device."""

    def encode_sym(self, x: Array, codes: Array, scale: Array, t0: int) -> None:
        n_kv_heads, n, d = x.shape
        x, stride = per_head(x)
        launch = Launch(ENCODE, "encode_sym", (n, n_kv_heads), 32)
        bits, capacity = 8 * codes.shape[2] // d, scale.shape[1]
        self.driver.launch(launch, x, stride, d, bits, codes, scale, capacity, *place(self.driver, t0))


def _encode(kernels: IntKernels, codec: Any, x: Array, t0: int) -> None:
    kernels.encode_sym(x, codec.arrays["codes"], codec.arrays["scale"], t0)


def _values(codec: Any) -> Reader:
    return byte_values(codec.arrays["codes"], (codec.arrays["scale"],), codec.head_dim, "FROM_MIDDLE")


_keys = column_keys(("codes", "scale"), "SCALE_PER_TOKEN")
LOOPS = dict.fromkeys(("int8", "symmetric4"), Loops(_keys, _values, encode=_encode, placed=True))
