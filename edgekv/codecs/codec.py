"""The base class of codecs: how a run of tokens' keys, or values, is stored, and what the stored bits mean.

A scheme is a codec for keys, one for values, and a policy of which tokens lie in which segment.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from edgekv.kernels import Kernels
from edgekv.kernels.arrays import contiguous
from edgekv.kernels.interface import MAX_F16
from edgekv.types import F32, U16, Array

Layout = dict[str, tuple[tuple[int, ...], str]]  # array name -> (shape, dtype)


class Codec(abc.ABC):
    """Packed storage of ``capacity`` tokens for ``n_kv_heads`` heads of ``head_dim`` channels.

    A codec must define ``kind``, `layout`, `token_bytes`, `encode`, and `decode`, or `scores` or `sums`; in NumPy
    they define what every backend computes. Backends call these, slowly, unless ``backends`` names a module for
    theirs (cpu, cuda) whose ``KERNELS[kind]``, of a class of that backend, encode and read the packed form.
    """

    kind: ClassVar[str]
    backends: ClassVar[Mapping[str, str]] = {}
    backend_state: Any = None
    """What a backend derives from the bound arrays, for itself; None after other arrays are bound."""
    fixed: F32 | None = None
    """Constants of a seed or an adapter, a rotation say, without which no token can be decoded; on the host."""

    def __init__(self, n_kv_heads: int, capacity: int, head_dim: int) -> None:
        self.n_kv_heads, self.capacity, self.head_dim = n_kv_heads, capacity, head_dim

    @abc.abstractmethod
    def layout(self) -> Layout:
        """Returns every array that it keeps: name -> (shape, dtype)."""

    @property
    @abc.abstractmethod
    def token_bytes(self) -> int:
        """Bytes that one token takes, all heads together; rounded up where tokens share some."""

    def bytes_of(self, n_tokens: int) -> int:
        """Returns the bytes that n tokens take, the shared ones counted once."""
        return n_tokens * self.token_bytes

    def bind(self, arrays: dict[str, Array], kernels: Kernels) -> None:
        """Takes the allocated arrays of `layout`, (n_kv_heads, ...) each, and the kernels to use on them."""
        self.arrays, self.kernels = arrays, kernels
        self.backend_state = None

    @abc.abstractmethod
    def encode(self, x: F32, t0: int) -> None:
        """Stores x (n_kv_heads, n, head_dim) as tokens t0, t0 + 1, ... Caches call `Kernels.encode`."""

    def decode(self, t0: int, t1: int) -> F32:
        """Returns tokens t0..t1 as float32 (n_kv_heads, t1 - t0, head_dim).

        Raises NotImplementedError for a codec without: one with kernels for the CPU and CUDA, and `scores` or
        `sums` in NumPy, needs none.
        """
        raise NotImplementedError(f"{type(self).__name__} has no decode")

    def scores(self, q: F32, t0: int, t1: int) -> F32:
        """Returns scores (n_kv_heads, M, t1 - t0) of queries q (n_kv_heads, M, head_dim) with the keys t0..t1."""
        scores: F32 = q @ self.decode(t0, t1).swapaxes(1, 2)
        return scores

    def sums(self, p: F32, t0: int, t1: int) -> F32:
        """Returns sums (n_kv_heads, M, head_dim) of the values t0..t1 with weights p (n_kv_heads, M, t1 - t0)."""
        return p @ self.decode(t0, t1)


WindowCodecs = Callable[[int, int, int], tuple[Codec, Codec]]
"""(KV heads, tokens, head_dim) -> how keys and how values are stored."""


def in_package(package: str, *names: str) -> Mapping[str, str]:
    """Returns `Codec.backends` of a package with a module for each backend, or for these alone."""
    return {name: f"{package}.{name}" for name in names or ("cpu", "cuda")}


def round_up_to_f16(x: F32) -> U16:
    """Returns the bits of the smallest float16 not below x >= 0, or of the largest float16, of the shape of x."""
    x = np.minimum(x, MAX_F16)
    half = x.astype(np.float16)
    bits: U16 = half.view(np.uint16) + (half.astype(np.float32) < x).astype(np.uint16)
    return bits


def to_half(x: F32) -> U16:
    """Returns the bits of the nearest float16 of x, of the shape of x."""
    return x.astype(np.float16).view(np.uint16)


def to_finite_half(x: npt.NDArray[np.floating]) -> U16:
    """Returns the bits (..., n) of the nearest finite float16 of x (..., n) >= 0."""
    return to_half(np.minimum(x, MAX_F16).astype(np.float32))


def from_half(bits: U16) -> F32:
    """Returns float16 bits as float32, of the same shape."""
    return contiguous(bits).view(np.float16).astype(np.float32)
