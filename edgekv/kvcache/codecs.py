"""How a run of tokens' keys, or values, is stored. A codec packs them; the kernels read the packed form.

A scheme is a codec for keys, one for values, and a policy of which tokens lie in which segment.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from edgekv.kernels import Kernels
from edgekv.kvcache.cache import Layout
from edgekv.types import F32, Array

WORD = 64  # tokens per block of packed codes, bits per word


class Codec(abc.ABC):
    """Packed storage of ``capacity`` tokens for ``n_kv_heads`` heads of ``head_dim`` channels.

    A codec must define ``kind``, `layout`, `token_bytes`, `encode` and `decode`. It is read by way of what it
    decodes to, slowly, unless ``backends`` has more: by backend (cpu, cuda; reference for one without `decode`) a
    module whose ``LOOPS[kind]`` reads it, and may encode it (`Loops` in loops.py of each backend).
    """

    kind: ClassVar[str]
    backends: ClassVar[Mapping[str, str]] = {}
    backend_state: Any = None
    """What the kernels remember of the bound arrays, theirs alone; None whenever the arrays are others."""

    def __init__(self, n_kv_heads: int, capacity: int, head_dim: int) -> None:
        self.n_kv_heads, self.capacity, self.head_dim = n_kv_heads, capacity, head_dim

    @abc.abstractmethod
    def layout(self) -> Layout:
        """Every array that it keeps: name -> (shape, dtype)."""

    @property
    @abc.abstractmethod
    def token_bytes(self) -> int:
        """Bytes that one token takes, all heads together; rounded up where tokens share some."""

    def bytes_of(self, n_tokens: int) -> int:
        """Bytes that n tokens take, the shared ones counted once."""
        return n_tokens * self.token_bytes

    def bind(self, arrays: dict[str, Array], kernels: Kernels) -> None:
        """The allocated arrays of `layout`, and the kernels to use on them. Each is (n_kv_heads, ...)."""
        self.arrays, self.kernels = arrays, kernels
        self.backend_state = None

    def encode(self, x: F32, t0: int) -> None:
        """Stores x (n_kv_heads, n, head_dim) as tokens t0, t0 + 1, ..."""
        self.kernels.encode(self, x, t0)

    def decode(self, t0: int, t1: int) -> F32:
        """Tokens t0..t1 as the numbers that they stand for, (n_kv_heads, t1 - t0, head_dim) float32.

        Raises NotImplementedError: codecs that bring loops for all backends need none.
        """
        raise NotImplementedError(f"{type(self).__name__} has no decode")


def in_backends(module: str, *names: str) -> Mapping[str, str]:
    """Returns `Codec.backends` of a module of edgekv's own backends: of ``names``, by default of all three."""
    return {name: f"edgekv.kernels.{name}.{module}" for name in names or ("reference", "cpu", "cuda")}


def in_package(package: str, *names: str) -> Mapping[str, str]:
    """Returns `Codec.backends` of a package with a module for each backend, or for these alone."""
    return {name: f"{package}.{name}" for name in names or ("reference", "cpu", "cuda")}


class F16(Codec):
    """IEEE half precision, 2 bytes per element."""

    kind = "f16"
    backends = in_backends("rows")

    def layout(self) -> Layout:
        return {"half": ((self.n_kv_heads, self.capacity, self.head_dim), "uint16")}

    @property
    def token_bytes(self) -> int:
        return self.n_kv_heads * self.head_dim * 2

    @staticmethod
    def round(x: F32) -> F32:
        """What `decode` gives for x once it is stored."""
        return x.astype(np.float16).astype(np.float32)

    def decode(self, t0: int, t1: int) -> F32:
        return self.arrays["half"][:, t0:t1].view(np.float16).astype(np.float32)

    def move(self, t0: int, t1: int, to: int) -> None:
        """Copies tokens t0..t1 to position ``to``; the ranges may overlap."""
        self.arrays["half"][:, to : to + t1 - t0] = self.arrays["half"][:, t0:t1].copy()


WindowCodecs = Callable[[int, int, int], tuple[Codec, Codec]]
"""(KV heads, tokens, head_dim) -> how keys and how values are stored."""


def f16_codecs(n_kv_heads: int, capacity: int, head_dim: int) -> tuple[Codec, Codec]:
    """Keys and values in half precision."""
    return F16(n_kv_heads, capacity, head_dim), F16(n_kv_heads, capacity, head_dim)


class Float32(Codec):
    """Single precision, 4 bytes per element: the exact baseline."""

    kind = "f32"
    backends = in_backends("rows")

    def layout(self) -> Layout:
        return {"single": ((self.n_kv_heads, self.capacity, self.head_dim), "float32")}

    @property
    def token_bytes(self) -> int:
        return self.n_kv_heads * self.head_dim * 4


class Int8(Codec):
    """Levels -127..127 as signed bytes times a float16 scale per token: head_dim + 2 bytes."""

    kind = "int8"
    backends = in_backends("ints")

    def layout(self) -> Layout:
        return self._layout(self.head_dim, "int8")

    def _layout(self, n_bytes: int, dtype: str) -> Layout:
        tokens = self.n_kv_heads, self.capacity
        return {"codes": ((*tokens, n_bytes), dtype), "scale": (tokens, "uint16")}

    @property
    def token_bytes(self) -> int:
        return self.n_kv_heads * (self.head_dim + 2)


class Symmetric4(Int8):
    """Levels -7..7 plus 8, two to a byte, times a float16 scale per token: head_dim / 2 + 2 bytes."""

    kind = "symmetric4"

    def layout(self) -> Layout:
        return self._layout(self.head_dim // 2, "uint8")

    @property
    def token_bytes(self) -> int:
        return self.n_kv_heads * (self.head_dim // 2 + 2)
