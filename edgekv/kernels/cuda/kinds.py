"""Which kinds of codecs the GPU reads: for each the C++ type that does, and what that needs of the queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from edgekv.errors import CacheError
from edgekv.kernels.contract.papers.codes import TABLE_BITS
from edgekv.kernels.cuda.codec import Codec, Queries
from edgekv.kernels.cuda.program import Array, Driver

Make = Callable[[Any], Codec]


class Preparing(Protocol):
    """The kernels that make queries what a codec's scores want."""

    driver: Driver

    def constant(self, x: Any) -> Array: ...
    def project(self, x: Array, matrix: Array) -> Array: ...
    def rotate(self, rotation: Any, x: Array) -> Array: ...
    def pack_sign_rows(self, x: Array) -> Array: ...
    def round_queries(self, q: Array, whole: Array, step: Array, rounded: Array) -> None: ...


class Keys(NamedTuple):
    """How keys of a kind are read.

    codec(stored): the C++ side of a stored codec. queries(kernels, stored, q (G, M, D)): the queries as its scores
    want them.
    """

    codec: Make
    queries: Callable[[Preparing, Any, Array], Queries]


def _rows(element: str, name: str) -> tuple[Make, Make]:
    """Keys and values in an array of numbers (G, capacity, D)."""

    def make(kind: str) -> Make:
        def codec(stored: Any) -> Codec:
            rows = stored.arrays[name]
            return Codec(f"{kind}<{element}>", "rows", (rows,), rows.shape[1], rows.shape[2])

        return codec

    return make("RowKeys"), make("RowValues")


F16_KEYS, F16_VALUES = _rows("u16", "half")
F32_KEYS, F32_VALUES = _rows("float", "single")


def _sign_keys(stored: Any) -> Codec:
    signs = stored.arrays["signs"]
    _, blocks, words, tile = signs.shape
    return Codec("SignKeys", "papers/signs", (signs,), blocks * tile, 64 * words, tiles=4)


def _centred_keys(stored: Any) -> Codec:
    a, bits = stored.arrays, same_bits(stored.bits, "k_bits")
    arrays = a["planes"], a["scale"], a["centres"], a["centre_step"]
    return Codec(
        "CentredKeys", "centred", arrays, a["scale"].shape[1], stored.width, (("KEY_BITS", bits),), tiles=4 // bits
    )


def same_bits(bits: Any, knob: str) -> int:
    """Those of all heads."""
    if bits.min() != bits.max():
        raise CacheError(f"kv: {knob}={bits.mean():g} with device='cuda': it takes whole numbers", field="kv")
    return int(bits[0])


def _columns(names: tuple[str, ...], scales: str) -> Make:
    """Keys in small integers, channel by channel in blocks of tokens."""

    def codec(stored: Any) -> Codec:
        arrays = tuple(stored.arrays[name] for name in names)
        _, blocks, n_bytes, block = arrays[0].shape
        bits, macros = 8 * n_bytes // stored.head_dim, (("KEY_SCALES", scales), ("KEY_BLOCK", block))
        capacity = arrays[1].shape[1] if scales == "SCALE_PER_TOKEN" else blocks * block
        tiles = max(1, 4 // bits)
        return Codec(f"ColumnKeys<{bits}>", "columns", arrays, capacity, stored.head_dim, macros, tiles=tiles)

    return codec


def byte_values(codes: Array, scales: tuple[Array, ...], width: int, meaning: str, tiles: int = 0) -> Codec:
    """Values in small integers, token by token: codes (G, capacity, bytes) or (G, capacity, bytes, 1)."""
    bits, macros = 8 * codes.shape[2] // width, (("VALUE_SCALES", meaning),)
    arrays, tiles = (codes, *scales), tiles or max(1, 4 // bits)
    return Codec(f"ByteValues<{bits}>", "byte_values", arrays, codes.shape[1], width, macros, tiles=tiles)


def _int4_values(stored: Any) -> Codec:
    a = stored.arrays
    return byte_values(a["codes"], (a["delta"], a["zero"]), stored.head_dim, "FROM_ZERO", tiles=4)


def _symmetric_values(stored: Any) -> Codec:
    return byte_values(stored.arrays["codes"], (stored.arrays["scale"],), stored.head_dim, "FROM_MIDDLE")


def _kivi_values(stored: Any) -> Codec:
    a = stored.arrays
    require_one_span(a["step"].shape[1])
    return byte_values(a["codes"], (a["step"], a["low"]), stored.head_dim, "FROM_LOW")


def require_one_span(spans: int) -> None:
    if spans > 1:
        raise CacheError(
            "kv='kivi2' with vgroup: device='cuda' has one range per value only; leave vgroup out", field="kv"
        )


def _interleaved_values(stored: Any) -> Codec:
    codes, scale = stored.arrays["codes"], stored.arrays["scale"]
    return Codec(
        "InterleavedValues",
        "interleaved_values",
        (codes, scale),
        scale.shape[1],
        codes.shape[3],
        (("VALUE_BITS", codes.shape[2] // 2),),
        tiles=4,
        rotation=stored.rotation,
    )


def _huffman(name: str) -> Make:
    def codec(stored: Any) -> Codec:
        pool, offsets, bits, table, _, plain_bits, low, step = stored.store()
        block = bits.shape[1] // offsets.shape[1]
        macros = ("CODE_BLOCK", block), ("PLAIN_BITS", plain_bits), ("TABLE_BITS", TABLE_BITS)
        arrays = pool, offsets, bits, table, low, step
        return Codec(name, "papers/huffman", arrays, bits.shape[1], stored.head_dim, macros, joins=False)

    return codec


def _sign_index(stored: Any) -> Codec:
    signs, levels, block = stored.arrays["signs"], stored.arrays["levels"], stored.block
    capacity, macros = levels.shape[1] * block, (("GROUP", block),)
    arrays = signs, levels
    return Codec(
        "FierKeys", "papers/fier", arrays, capacity, signs.shape[2], macros, joins=False, tiles=2, blocks=16
    )


def _page_index(stored: Any) -> Codec:
    bounds = stored.arrays["bounds"]
    return Codec("RowKeys<u16>", "rows", (bounds,), bounds.shape[1], bounds.shape[2])


def _as_they_are(kernels: Preparing, stored: Any, q: Array) -> Queries:
    return Queries(q)


def _sketches(kernels: Preparing, stored: Any, q: Array) -> Queries:
    """Row r * n + j has the temperature of head r."""
    codes = kernels.pack_sign_rows(kernels.project(q, stored.projection))
    scale = np.repeat(1 / (stored.bits * stored.tau), q.shape[1] // stored.tau.shape[1], axis=1)
    return Queries(codes, codes, kernels.constant(scale))


def _whole(kernels: Preparing, stored: Any, q: Array) -> Queries:
    """Rotated, and in whole numbers."""
    x, empty = kernels.rotate(stored.rotation, q), kernels.driver.empty
    whole, step, rounded = empty(x.shape, np.int32), empty(q.shape[:2], np.float32), empty(x.shape, np.float32)
    kernels.round_queries(x, whole, step, rounded)
    return Queries(x, whole, step * kernels.constant(stored.lam)[:, None], rounded)


def _bounds(kernels: Preparing, stored: Any, q: Array) -> Queries:
    """The positive part meets the largest key of a page, the negative part the smallest."""
    return Queries(np.concatenate([np.maximum(q, 0), np.minimum(q, 0)], axis=2))


KEYS: dict[str, Keys] = {
    "f16": Keys(F16_KEYS, _as_they_are),
    "f32": Keys(F32_KEYS, _as_they_are),
    "signs": Keys(_sign_keys, _sketches),
    "centred_planes": Keys(_centred_keys, _whole),
    "plane_keys": Keys(_centred_keys, _whole),
    "symmetric_keys": Keys(_columns(("codes", "scale"), "SCALE_PER_TOKEN"), _as_they_are),
    "kivi_keys": Keys(_columns(("codes", "step", "low"), "STEP_PER_CHANNEL"), _as_they_are),
    "huffman_keys": Keys(_huffman("HuffmanKeys"), _as_they_are),
    "sign_index": Keys(_sign_index, _as_they_are),
    "page_index": Keys(_page_index, _bounds),
}

VALUES: dict[str, Make] = {
    "f16": F16_VALUES,
    "f32": F32_VALUES,
    "int4": _int4_values,
    "interleaved": _interleaved_values,
    "symmetric_values": _symmetric_values,
    "kivi_values": _kivi_values,
    "huffman_values": _huffman("HuffmanValues"),
}

SECOND_STAGE = "plane_values"
"""Values that are chosen by the probabilities: `edgekv.kernels.cuda.gather`."""

KINDS = {*KEYS, *VALUES, SECOND_STAGE}
