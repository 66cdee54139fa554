"""Readers of KIVI's codes on a GPU: keys per channel of a group of tokens, values per token."""

from __future__ import annotations

import pathlib
from typing import Any

from edgekv.codecs.ints.cuda import read_integers
from edgekv.errors import CacheError
from edgekv.kernels.cuda.kernels import CudaCodec, Reader


def _read_keys(codec: Any) -> Reader:
    a, bits = codec.arrays, 8 * codec.arrays["codes"].shape[2] // codec.head_dim
    arrays, capacity = (a["codes"], a["step"], a["low"]), a["codes"].shape[1]
    macros = (("GROUP", capacity // a["step"].shape[1]),)
    file = pathlib.Path(__file__).with_name("keys")
    return Reader(f"RowKeys<KiviRow<{bits}>>", file, arrays, capacity, codec.head_dim, macros)


def _read_values(codec: Any) -> Reader:
    a = codec.arrays
    if a["step"].shape[1] > 1:
        raise CacheError("kivi2 with vgroup: a GPU has one range per value only; leave vgroup out", field="kv")
    return read_integers("RowValues", a["codes"], (a["step"], a["low"]), codec.head_dim, "FROM_LOW")


KERNELS = {
    "kivi_keys": CudaCodec(_read_keys),
    "kivi_values": CudaCodec(values=_read_values),
}
