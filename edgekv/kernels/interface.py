"""The functions that every kernel backend provides.

`attend` is all that decoding needs, beside each codec's encoding. What a codec means is written in NumPy by its
class (`edgekv.codecs`); `edgekv.kernels.reference` says what the other functions compute.

One layer at a time, no batch axis. H query heads share G KV heads, R = H // G each. Queries (H, n, D) are
reinterpreted for free as q (G, M, D) with M = R * n: the head of the group outer, the token inner. Stores are
preallocated for `cap` tokens (`edgekv.kernels.arrays.zeros`), hold float16 as its bits in uint16, and are
C-contiguous, as is every array here except scores, whose last axis alone must be.

Token ranges are half-open and need not touch block borders. A kernel writes all of its outputs and
nothing else, and does not check its arguments: shapes and ranges are the caller's duty.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from edgekv.kernels import arrays
from edgekv.kernels.arrays import Memory
from edgekv.types import F32, I32, I64, Array

BLOCK = 64
"""Tokens per block of sign codes, and per unit of work in every kernel."""

GEMV_ROWS = 8
"""Rows at most of a gemv, which gives each row the same bits as alone; products of more rows use a gemm."""

MAX_F16 = np.float32(65504)
"""What scales and other stored float16 numbers are bounded by."""


def bound_scores(s: Array, cap: float | None) -> None:
    """Replaces s (..., columns) by cap * tanh(s / cap), in place, on the host or a device; None: no bound."""
    if cap is not None:
        s *= np.float32(1 / cap)
        np.tanh(s, out=s)
        s *= np.float32(cap)


class CodecLike(Protocol):
    """The attributes of every codec (`edgekv.codecs.codec.Codec`) that backends use.

    backends, kind: name the module and the loops that read it. backend_state: what a backend has derived from the
    arrays; None again when the codec gets other arrays.
    """

    kind: ClassVar[str]
    backends: ClassVar[Mapping[str, str]]
    arrays: dict[str, Any]
    n_kv_heads: int
    head_dim: int
    backend_state: Any


class Segment(NamedTuple):
    """Tokens first..stop of the stores of two codecs.

    position: where token ``first`` stands in the conversation; the others follow it, unless ``positions``
    (G, capacity) int32 says where each token stands.
    """

    keys: Any  # CodecLike
    values: Any  # CodecLike
    first: int
    stop: int
    position: int = 0
    positions: I32 | None = None


Visible = tuple[I64, I64]
"""(lo, hi), each (n,): query token j sees the positions lo[j] up to but not including hi[j]."""


class Workspace:
    """Scratch buffers by name and dtype, which grow when needed; each holds until its name is used again."""

    def __init__(self, memory: Memory = arrays) -> None:
        self.memory = memory
        self._buffers: dict[tuple[str, Any], Array] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
        """Returns a C-contiguous array of the shape and undefined contents, valid until its name is used again."""
        size, key = math.prod(shape), (name, dtype)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.size < size:
            buffer = self._buffers[key] = self.memory.empty((size,), dtype)
        return buffer[:size].reshape(shape)

    def buffers(self) -> list[Array]:
        """Returns all buffers, each of shape (size,)."""
        return list(self._buffers.values())


class Kernels(Protocol):
    """A backend is a module with these functions, or an object."""

    backend: str
    """reference, cpu or cuda."""

    def attend(
        self,
        queries: F32,
        segments: Sequence[Segment],
        visible: Visible,
        out: F32,
        weights: F32 | None = None,
        sinks: F32 | None = None,
        cap: float | None = None,
    ) -> None:
        """out (H, n, D) = softmax(queries . keys) values over the visible tokens of all segments.

        queries (H, n, D), multiplied by the score scale, are C-contiguous, as is ``out``. Each codec says
        what a score and a sum of values are: `scores`, `sums`. A query that sees nothing gets zeros. ``weights``
        (G, R * n, tokens of all segments), where given, gets the softmax, segment after segment. ``sinks`` (H,),
        where given, is a score more for each head's queries, of no token and without a value: the weights of the
        tokens then sum to less than 1; CUDA raises ValueError for them. ``cap``, where given, makes a score
        cap * tanh(score / cap), as in Gemma 2.
        """

    def append(self, keys: CodecLike, values: CodecLike, k: F32, v: F32, t0: int) -> None:
        """Encodes k and v (G, n, D) as tokens t0.. of two codecs: one call where both take tokens one by one."""

    def encode(self, codec: CodecLike, x: F32, t0: int) -> None:
        """Stores x (G, n, D) as tokens t0.. of a codec, as its `encode` does."""

    def scores(self, codec: CodecLike, queries: F32, t0: int, t1: int, s: F32) -> None:
        """Fills s (G, M, t1 - t0) with scores of queries (G, M, D) and tokens t0..t1 of a codec of keys.

        For an index of keys (Quest's pages, for example) t0 and t1 count its entries.
        """

    def project(self, x: F32, matrix: F32) -> F32:
        """Returns x (G, n, d) times the transpose of matrix (b, d): (G, n, b)."""

    def softmax(self, s: F32, lo: I64, hi: I64) -> None:
        """Takes the softmax over columns lo[m]..hi[m] of row m of each group, 0 elsewhere; lo, hi (M,)."""

    def split_rope(
        self,
        qkv: F32,
        cos: F32,
        sin: F32,
        q: F32,
        k: F32,
        v: F32,
        scale: float,
        q_norm: F32,
        k_norm: F32,
        eps: float,
    ) -> None:
        """Splits the projection qkv (n, (H + 2G) * D) into q (H, n, D) and k, v (G, n, D); rotates q and k."""

    def hadamard(self, x: F32, flips: F32, out: F32) -> None:
        """Fills out (A, n, D) with H (flips * x) / sqrt(D) of x (A, n, d <= D) and flips (D,)."""

    def hadamard_back(self, x: F32, flips: F32, out: F32) -> None:
        """Adds the first d elements of the inverse of `hadamard` of x (A, n, D) to out (A, n, d)."""


FUNCTIONS: dict[str, str] = {"short_conv": "recurrence", "gated_delta": "recurrence"}
"""Functions that only some models call -> their module in each backend. CUDA has none of them."""


def find_codec_kernels(backend: str, codec: Any) -> Any:
    """Returns ``KERNELS[codec.kind]`` of a codec's module for ``backend`` (cpu, cuda), None if it has none."""
    module: str | None = codec.backends.get(backend)
    return None if module is None else _loops(module, codec.kind)


@functools.cache
def _loops(module: str, kind: str) -> Any:
    return importlib.import_module(module).KERNELS[kind]


def find_function(backend: str, name: str) -> Any:
    """Returns a function of FUNCTIONS in the package ``backend``. Raises AttributeError for any other name."""
    if name not in FUNCTIONS:
        raise AttributeError(f"module {backend!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{backend}.{FUNCTIONS[name]}"), name)
