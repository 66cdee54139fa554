"""How the tokens of a kind of codec are read and stored on a GPU: a C++ type, its arrays, and queries for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, cast

from edgekv.errors import CacheError
from edgekv.kernels.cuda.program import Array, Driver, Macros
from edgekv.kernels.registry import find_loops

BACKEND = "edgekv.kernels.cuda"


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


class Tools(Protocol):
    """What loops use of the kernels (`edgekv.kernels.cuda.kernels.CudaKernels`)."""

    driver: Driver

    def constant(self, x: Any) -> Array: ...
    def project(self, x: Array, matrix: Array) -> Array: ...
    def rotate(self, rotation: Any, x: Array) -> Array: ...
    def round_queries(self, q: Array, whole: Array, step: Array) -> None: ...


def as_they_are(tools: Tools, codec: Any, q: Array) -> Queries:
    """Queries for keys whose scores are plain products."""
    return Queries(q)


@dataclasses.dataclass(frozen=True)
class Loops:
    """What a file for a kind of codec says; ``tools`` are the kernels.

    keys, values: (codec) -> what reads it as keys, or as values. queries: (tools, codec, q (G, M, D)) -> the
    queries as its scores want them. encode: (tools, codec, x (G, n, D), t0) stores x as tokens t0.., where
    `Codec.encode` does not do so itself. placed: whether that takes a token to a place that moves (a `Counter`).
    """

    keys: Callable[[Any], Reader] | None = None
    values: Callable[[Any], Reader] | None = None
    queries: Callable[[Tools, Any, Array], Queries] = as_they_are
    encode: Callable[[Any, Any, Array, int], None] | None = None
    placed: bool = False


def loops_of(codec: Any) -> Loops:
    """Returns how a codec, or a codec of that class, is read. Raises CacheError (field kv) where the GPU can't."""
    loops = find_loops("cuda", codec)
    if loops is None:
        raise CacheError(
            f"codec of kind {codec.kind!r}: no kernels on device='cuda'; use device='cpu'", field="kv"
        )
    return cast(Loops, loops)


def read_keys(codec: Any) -> Reader:
    """What reads a codec that holds keys."""
    make = loops_of(codec).keys
    assert make is not None, codec.kind
    return make(codec)


def read_values(codec: Any) -> Reader:
    """What reads a codec that holds values."""
    make = loops_of(codec).values
    assert make is not None, codec.kind
    return make(codec)
