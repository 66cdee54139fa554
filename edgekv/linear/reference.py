"""The reference backend: float32 NumPy, straight from the checkpoint's tensors."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

import numpy as np

from edgekv.linear.activations import ACTIVATIONS
from edgekv.linear.blocks import LinearBlocks
from edgekv.linear.experts import add_experts, expert_rows, gated
from edgekv.linear.low_rank import Changes, add_changes, nbytes
from edgekv.linear.weights import Weights
from edgekv.models.architecture import Ops
from edgekv.types import F32, I64


class NumpyOps(Ops):
    """Operators that compute at once; float32 in, float32 out. changes: beside the weights."""

    def __init__(self, weights: Weights) -> None:
        self.weights, self._linears = weights, weights.arch.linears()
        self.changes: Changes = {}
        self._matrices: dict[str, F32] = {}

    def linear(self, x: F32, name: str) -> F32:
        y = self._stored_linear(x, name)
        if name in self.changes:
            add_changes(x, y, self.changes[name], self._multiply)
        return y

    def _multiply(self, x: F32, matrix: F32) -> F32:
        """A `Product`."""
        y: F32 = x @ matrix.T
        return y

    def _stored_linear(self, x: F32, name: str) -> F32:
        bias = self.weights.bias(name)
        y = self._multiply(x, self._matrix(name))
        if bias is not None:
            y += bias
        return y

    def _matrix(self, name: str) -> F32:
        if name not in self._matrices:
            self._matrices[name] = self.weights.matrix(name)
        return self._matrices[name]

    def add_linear(self, x: F32, y: F32, name: str) -> F32:
        return x + self.linear(y, name)

    def rms_norm(self, x: F32, name: str, eps: float) -> F32:
        mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
        normed: F32 = x / np.sqrt(mean_square + np.float32(eps)) * self.weights.vector(name)
        return normed

    def layer_norm(self, x: F32, name: str, eps: float) -> F32:
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = np.mean(np.square(centred), axis=-1, keepdims=True)
        normed = centred / np.sqrt(variance + np.float32(eps))
        scaled: F32 = normed * self.weights.vector(f"{name}.weight") + self.weights.vector(f"{name}.bias")
        return scaled

    def activation(self, x: F32, kind: str) -> F32:
        return ACTIVATIONS[kind](x)

    def gated_linear(self, x: F32, name: str, kind: str) -> F32:
        gate, up = np.split(self.linear(x, name), 2, axis=-1)
        return ACTIVATIONS[kind](gate) * up

    def split(self, x: F32, sizes: Sequence[int]) -> list[F32]:
        return np.split(x, np.cumsum(sizes)[:-1], axis=-1)

    def join(self, parts: Sequence[F32]) -> F32:
        return np.concatenate(parts, axis=-1)

    def add(self, a: F32, b: F32) -> F32:
        return a + b

    def mul(self, a: F32, b: F32) -> F32:
        return a * b

    def scale(self, x: F32, factor: float) -> F32:
        scaled: F32 = x * np.float32(factor)
        return scaled

    def soft_cap(self, x: F32, cap: float) -> F32:
        capped: F32 = np.tanh(x / np.float32(cap)) * np.float32(cap)
        return capped

    def add_experts(self, x: F32, y: F32, i: int) -> F32:
        config = self.weights.arch.config
        experts, gate = config.experts_of(i), functools.partial(gated, config)
        assert experts is not None
        logits = self.linear(y, f"{i}.router")
        return add_experts(experts, i, x, y, logits, self._expert_products, gate)

    def _expert_products(self, rows: F32, of: I64, name: str) -> F32:
        matrices, bias = self._matrix(name), self.weights.bias(name)
        return expert_rows(rows, of, matrices, bias, self._linears[name].n_experts, self._multiply)


class NumpyLinear(LinearBlocks):
    """The three blocks of every layer, computed with NumPy."""

    def __init__(self, weights: Weights) -> None:
        self.arch, self._ops = weights.arch, NumpyOps(weights)
        self.weights_bytes = weights.nbytes

    def with_changes(self, changes: Changes) -> NumpyLinear:
        other = copy.copy(self)
        other._ops = copy.copy(self._ops)
        other._ops.changes, other.changes_bytes = changes, nbytes(changes)
        other.weights_bytes = self.weights_bytes + other.changes_bytes
        return other

    def attention_in(self, i: int, x: F32) -> F32:
        return np.asarray(self.arch.attention_in(self._ops, i, x), np.float32)

    def attention_out(self, i: int, x: F32, attention: F32) -> F32:
        return np.asarray(self.arch.attention_out(self._ops, i, x, attention), np.float32)

    def head(self, x: F32) -> F32:
        return np.asarray(self.arch.head(self._ops, x), np.float32)
