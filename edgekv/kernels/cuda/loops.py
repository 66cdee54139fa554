"""How the tokens of a kind of codec are read and stored on a GPU: a C++ type, its arrays, and queries for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

from edgekv.kernels import kinds
from edgekv.kernels.contract.segment import Segment
from edgekv.kernels.cuda.program import Array, Driver, Macros

BACKEND = "edgekv.kernels.cuda"
CUDA_KINDS = frozenset(kind for kind in kinds.KINDS if kinds.reads(BACKEND, kind))
"""Of codecs that the GPU reads."""


@dataclasses.dataclass(frozen=True)
class Reader:
    """The C++ type ``name`` in ``file`` reads ``arrays`` of ``capacity`` tokens, ``width`` channels a token."""

    name: str
    file: str
    arrays: tuple[Array, ...]
    capacity: int
    width: int
    macros: Macros = ()
    joins: bool = True  # whether attention of one launch takes it: at most five arrays of keys, four of values
    tiles: int = 1  # of 64 tokens that a block reads at once, to have enough bytes on their way
    blocks: int = 8  # of its kernels that a multiprocessor holds
    rotation: Any = None  # of the values: sums are rotated back


@dataclasses.dataclass(frozen=True)
class Queries:
    """x (G, M, width), what the reader's kernel needs beside it, and a factor (G, M)."""

    x: Array
    codes: Array | None = None
    scale: Array | None = None
    rounded: Array | None = None  # what the codes stand for


class Estimates(NamedTuple):
    """What reads estimates of scores, the queries for it, and the tiles (tiles,) that these were measured on."""

    reader: Reader
    queries: Queries
    sampled: Array


class Tools(Protocol):
    """What loops use of the kernels (`edgekv.kernels.cuda.kernels.CudaKernels`)."""

    driver: Driver

    def constant(self, x: Any) -> Array: ...
    def project(self, x: Array, matrix: Array) -> Array: ...
    def rotate(self, rotation: Any, x: Array) -> Array: ...
    def round_queries(self, q: Array, whole: Array, step: Array, rounded: Array) -> None: ...


def as_they_are(tools: Tools, codec: Any, q: Array) -> Queries:
    """Queries for keys whose scores are plain products."""
    return Queries(q)


@dataclasses.dataclass(frozen=True)
class Loops:
    """What a file for a kind of codec says; ``tools`` are the kernels.

    keys, values: (codec) -> what reads it as keys, or as values. queries: (tools, codec, q (G, M, D)) -> the
    queries as its scores want them. encode: (tools, codec, x (G, n, D), t0) stores x as tokens t0.., where
    `Codec.encode` does not do so itself. placed: whether that takes a token to a place that moves (a `Counter`).
    estimate: (kernels, segment, most, keys, queries, s (G, M, most - first)) -> `Estimates`: of keys whose values
    have a second stage, of tokens up to ``most``; s is used up. select_tiles: (kernels, segment, estimates, s,
    totals (G, M), n) -> the tiles to scan (G, n, tiles) and counts (G, n, 3) for the second stage; totals: the
    logarithm of the sum of exp over a row. second_stage: (kernels, segment, queries, p (G, M, tokens), counts,
    out) -> the change of p's sums (G, M), where the scan's probabilities say which tokens are read once more.
    """

    keys: Callable[[Any], Reader] | None = None
    values: Callable[[Any], Reader] | None = None
    queries: Callable[[Tools, Any, Array], Queries] = as_they_are
    encode: Callable[[Any, Any, Array, int], None] | None = None
    placed: bool = False
    estimate: Callable[[Any, Segment, int, Reader, Queries, Array], Estimates] | None = None
    select_tiles: Callable[[Any, Segment, Estimates, Array, Array, int], tuple[Array, Array]] | None = None
    second_stage: Callable[[Any, Segment, Queries, Array, Array, Array], Array] | None = None


def loops_of(kind: str) -> Loops:
    """Raises CacheError (field kv) for a kind that the GPU does not read."""
    return cast(Loops, kinds.find_loops(BACKEND, kind))


def read_keys(codec: Any) -> Reader:
    """What reads a codec that holds keys."""
    make = loops_of(codec.kind).keys
    assert make is not None, codec.kind
    return make(codec)


def read_values(codec: Any) -> Reader:
    """What reads a codec that holds values."""
    make = loops_of(codec.kind).values
    assert make is not None, codec.kind
    return make(codec)
