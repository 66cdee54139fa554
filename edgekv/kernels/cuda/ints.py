"""Integers of 8, 4 or 2 bits with linear scales: the kernels of `minicache4`, `dense:dtype=q8` and `kivi2`."""

from __future__ import annotations

from edgekv.errors import CacheError
from edgekv.kernels.cuda.backend import Backend
from edgekv.kernels.cuda.codec import THREADS, Codec, Queries, Scores, per_head
from edgekv.kernels.cuda.dense import ENCODE
from edgekv.kernels.cuda.program import Array


class IntKernels(Backend):
    def encode_sym(self, x: Array, codes: Array, scale: Array, t0: int) -> None:
        groups, n, d = x.shape
        _, blocks, n_bytes, block = codes.shape
        x, stride = per_head(x)
        self.driver.launch(
            *(ENCODE, "encode_sym", (n, groups), 32, x, stride, d, 8 * n_bytes // d),
            *(codes, blocks, block, scale, scale.shape[1], t0, self.driver.shift),
        )

    def scores_sym(
        self, q: Array, codes: Array, scale: Array, t0: int, t1: int, s: Array | Scores, s0: int
    ) -> None:
        keys = _columns(q, codes, (codes, scale), scale.shape[1], "SCALE_PER_TOKEN")
        self.score(keys, Queries(q), t0, t1, s, s0)

    def values_sym(
        self, p: Array | Scores, s0: int, codes: Array, scale: Array, t0: int, t1: int, out: Array
    ) -> None:
        values = _bytes(out, codes.shape[2], (codes, scale), scale.shape[1], "FROM_MIDDLE")
        self.accumulate(p, s0, values, t0, t1, out)

    def encode_kivi_keys(self, x: Array, codes: Array, step: Array, low: Array, t0: int) -> None:
        groups, n, d = x.shape
        _, blocks, n_bytes, block = codes.shape
        x, stride = per_head(x)
        self.driver.launch(
            *(ENCODE, "encode_kivi_keys", (n // block, groups), THREADS, x, stride, d, 8 * n_bytes // d),
            *(codes, step, low, blocks, block, t0 // block),
        )

    def scores_kivi(
        self, q: Array, codes: Array, step: Array, low: Array, t0: int, t1: int, s: Array | Scores, s0: int
    ) -> None:
        _, blocks, _, block = codes.shape
        keys = _columns(q, codes, (codes, step, low), blocks * block, "STEP_PER_CHANNEL")
        self.score(keys, Queries(q), t0, t1, s, s0)

    def encode_kivi_values(self, x: Array, codes: Array, step: Array, low: Array, t0: int) -> None:
        groups, n, d = x.shape
        spans = step.shape[1]
        _require_one_span(spans)
        x, stride = per_head(x)
        self.driver.launch(
            *(ENCODE, "encode_kivi_values", (n, groups), 32, x, stride, d, 8 * codes.shape[2] // d),
            *(codes, step, low, spans, step.shape[2], t0),
        )

    def values_kivi(
        self, p: Array | Scores, s0: int, codes: Array, step: Array, low: Array, t0: int, t1: int, out: Array
    ) -> None:
        _require_one_span(step.shape[1])
        values = _bytes(out, codes.shape[2], (codes, step, low), codes.shape[1], "FROM_LOW")
        self.accumulate(p, s0, values, t0, t1, out)


def _columns(q: Array, codes: Array, arrays: tuple[Array, ...], capacity: int, scales: str) -> Codec:
    n_bytes, block = codes.shape[2:]
    bits = 8 * n_bytes // q.shape[2]
    macros = ("KEY_SCALES", scales), ("KEY_BLOCK", block)
    return Codec(f"ColumnKeys<{bits}>", "columns", arrays, capacity, q.shape[2], macros, tiles=max(1, 4 // bits))


def _bytes(out: Array, n_bytes: int, arrays: tuple[Array, ...], capacity: int, scales: str) -> Codec:
    bits = 8 * n_bytes // out.shape[2]
    macros = (("VALUE_SCALES", scales),)
    return Codec(f"ByteValues<{bits}>", "bytes", arrays, capacity, out.shape[2], macros, tiles=max(1, 4 // bits))


def _require_one_span(spans: int) -> None:
    if spans > 1:
        raise CacheError("--kv kivi2:vgroup: --device cuda has one range per value only; leave vgroup out")
