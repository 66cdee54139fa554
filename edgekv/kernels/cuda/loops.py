"""How a codec is read and stored on a GPU, and what all kernels share: scratch, operands, how work is cut."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from edgekv.errors import CacheError
from edgekv.kernels.cuda.driver import Array, Driver, Macros, Program
from edgekv.kernels.registry import find_loops
from edgekv.types import I64

THREADS, TILE = 128, 64
MOST_ROWS = 8  # of queries that one block takes
MOST_CHANNELS = 1024
MOST_SHARES = 128  # blocks that share the tokens of a KV head
MOST_CONSTANTS = 4096
ENCODE = Program(("exact",), exact=True)
Tools = Any  # `edgekv.kernels.cuda.kernels.CudaKernels`, to the files of codecs


@dataclasses.dataclass(frozen=True)
class Reader:
    """The C++ type ``name`` in ``file`` reads ``arrays`` of ``capacity`` tokens, ``width`` channels a token."""

    name: str
    file: Any  # as in `Program.files`
    arrays: tuple[Array, ...]
    capacity: int
    width: int
    macros: Macros = ()
    joins: bool = True  # whether attention of one launch takes it: at most five arrays of keys, four of values
    tiles: int = 1  # of 64 tokens that a block reads at once, to have enough bytes on their way
    rotation: Any = None  # of the values: sums are rotated back


@dataclasses.dataclass(frozen=True)
class Queries:
    """x (G, M, width), what the reader's kernel needs beside it, and a factor (G, M)."""

    x: Array
    codes: Array | None = None
    scale: Array | None = None


def as_they_are(tools: Tools, codec: Any, q: Array) -> Queries:
    """Queries (G, M, D) for keys whose scores are plain products."""
    return Queries(q)


class Fused(NamedTuple):
    """A kernel for a pair of codecs in place of attend.cu's own, with ``macros`` beside those of all pairs.

    A launch takes ``most_rows`` query rows, and a multiprocessor holds ``blocks``. Queries come as they are, with
    codes and scale as in `Queries`.
    """

    file: pathlib.Path
    macros: Macros
    most_rows: int
    blocks: int
    codes: Array
    scale: Array


@dataclasses.dataclass(frozen=True)
class Loops:
    """What a file for a kind of codec says; ``tools`` are the kernels.

    keys, values: (codec) -> what reads it as keys, or as values. queries: (tools, codec, q (G, M, D)) -> the
    queries as its scores want them. encode: (tools, codec, x (G, n, D), t0) stores x as tokens t0.., else
    `Codec.encode` does. placed: whether that takes a token to a place that moves (a `Counter`). fused: of keys,
    (driver, query rows, keys, values) -> the pair's own kernel, if there is one.
    """

    keys: Callable[[Any], Reader] | None = None
    values: Callable[[Any], Reader] | None = None
    queries: Callable[[Tools, Any, Array], Queries] = as_they_are
    encode: Callable[[Tools, Any, Array, int], None] | None = None
    placed: bool = False
    fused: Callable[[Driver, int, Any, Any], Fused | None] = lambda *pair: None


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


class Backend:
    """The families of kernels derive from it."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._scratch: dict[str, Array] = {}
        self._constants: dict[tuple[Any, ...], Array] = {}

    def constant(self, x: Array | npt.NDArray[Any]) -> Array:
        """A small operand such as (G, R) that may come from the host, uploaded once for each of its values."""
        if not isinstance(x, np.ndarray):
            return x
        key = x.shape, x.dtype.str, x.tobytes()
        if key not in self._constants:
            if len(self._constants) >= MOST_CONSTANTS:
                self._constants.clear()
            self._constants[key] = self.driver.upload(x)
        return self._constants[key]

    def scratch(self, name: str, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
        """A buffer for one launch, contents undefined."""
        size = int(np.prod(shape))
        buffer = self._scratch.get(name)
        if buffer is None or buffer.size < size:
            buffer = self._scratch[name] = self.driver.empty((size,), dtype)
        return buffer[:size].reshape(shape)

    def buffers(self) -> list[Array]:
        """Arrays (size,) that launches use beside their operands."""
        return [*self._scratch.values(), *self._constants.values()]

    def splits(self, rounds: int, others: int, blocks: int = 8, beside: int = 0) -> int:
        """Into how many parts to cut a range of rounds, of which there are `others`, each beside some blocks.

        All of them run at once where a multiprocessor holds `blocks`: a few more would take as long again.
        """
        at_once = self.driver.multiprocessors * blocks // others - beside
        return max(1, min(rounds, at_once, MOST_SHARES))

    def per_token(self, *numbers: I64) -> tuple[Any, ...]:
        """For a kernel: whether query tokens differ, their numbers (len(numbers), n), and the first token's."""
        many = any((x != x[0]).any() for x in numbers)
        array = self.constant(np.stack(numbers).astype(np.int32)) if many else self.driver.shift
        return int(many), array, *(int(x[0]) for x in numbers)


def rows_at_once(rows: int) -> int:
    """Queries that a block takes at once: a power of two, so that few variants are compiled."""
    return min(MOST_ROWS, 1 << (rows - 1).bit_length())


def tiles_at_once(rows: int, *readers: Reader) -> int:
    """Tiles that a block takes at once; of many queries the sums fill the registers."""
    return min(reader.tiles for reader in readers) if rows <= 2 else 1


def n_rounds(t0: int, t1: int, tiles: int) -> int:
    """Rounds of `tiles` tiles over the tokens t0..t1."""
    return -(-(-(-t1 // TILE) - t0 // TILE) // tiles)


def strides(x: Array) -> tuple[int, int]:
    """Elements between the heads and between the rows of x (G, M, S)."""
    return x.strides[0] // x.itemsize, x.strides[1] // x.itemsize


def per_head(x: Array) -> tuple[Array, int]:
    """x (G, n, D) with the rows of a head contiguous, and the elements between heads."""
    n, d = x.shape[1:]
    if x.strides[2] != x.itemsize or (n > 1 and x.strides[1] != d * x.itemsize):
        x = x.copy()
    return x, x.strides[0] // x.itemsize if x.shape[0] > 1 else n * d


def check_width(width: int) -> None:
    """CacheError where a head has more channels than a block can hold."""
    if width > MOST_CHANNELS:
        raise CacheError(
            f"head_dim {width}: device='cuda' takes at most {MOST_CHANNELS} channels; use device='cpu'"
        )
