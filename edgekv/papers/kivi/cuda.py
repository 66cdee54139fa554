"""KIVI's codes: keys per channel over a group of tokens, values per token."""

from __future__ import annotations

import pathlib
from typing import Any

from edgekv.errors import CacheError
from edgekv.kernels.cuda.driver import Array, Launch, Program
from edgekv.kernels.cuda.ints import byte_values, column_keys
from edgekv.kernels.cuda.loops import THREADS, Loops, Reader, Tools, per_head

FOLDER = pathlib.Path(__file__).parent
ENCODE = Program(("exact", FOLDER / "encode"), exact=True)


def encode_kivi_keys(tools: Tools, x: Array, codes: Array, step: Array, low: Array, t0: int) -> None:
    """As `edgekv.papers.kivi.reference.encode_kivi_keys`."""
    n_kv_heads, n, d = x.shape
    (_, capacity, n_bytes), blocks = codes.shape, step.shape[1]
    block = capacity // blocks
    x, stride = per_head(x)
    launch = Launch(ENCODE, "encode_kivi_keys", (n // block, n_kv_heads), THREADS)
    store = codes, step, low, blocks, block
    tools.driver.launch(launch, x, stride, d, 8 * n_bytes // d, *store, t0 // block)


def encode_kivi_values(tools: Tools, x: Array, codes: Array, step: Array, low: Array, t0: int) -> None:
    """As `edgekv.papers.kivi.reference.encode_kivi_values`, of one span. Raises CacheError for several."""
    n_kv_heads, n, d = x.shape
    spans, capacity = step.shape[1:]
    _require_one_span(spans)
    x, stride = per_head(x)
    launch = Launch(ENCODE, "encode_kivi_values", (n, n_kv_heads), 32)
    tools.driver.launch(launch, x, stride, d, 8 * codes.shape[2] // d, codes, step, low, spans, capacity, t0)


def _require_one_span(spans: int) -> None:
    if spans > 1:
        raise CacheError(
            "kv='kivi2' with vgroup: device='cuda' has one range per value only; leave vgroup out", field="kv"
        )


def _store(codec: Any) -> tuple[Array, Array, Array]:
    return codec.arrays["codes"], codec.arrays["step"], codec.arrays["low"]


def _encode_keys(tools: Tools, codec: Any, x: Array, t0: int) -> None:
    encode_kivi_keys(tools, x, *_store(codec), t0)


def _encode_values(tools: Tools, codec: Any, x: Array, t0: int) -> None:
    encode_kivi_values(tools, x, *_store(codec), t0)


def _read_values(codec: Any) -> Reader:
    codes, step, low = _store(codec)
    _require_one_span(step.shape[1])
    return byte_values(codes, (step, low), codec.head_dim, "FROM_LOW")


LOOPS = {
    "kivi_keys": Loops(column_keys(("codes", "step", "low"), "STEP_PER_CHANNEL"), encode=_encode_keys),
    "kivi_values": Loops(values=_read_values, encode=_encode_values),
}
