"""The operators of `edgekv.models.architecture` in NumPy, float32: the reference of those on the CPU and in CUDA.

Also their parts: activations, mixtures of experts, and LoRAs beside the weights.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from edgekv.checkpoint.lora import Delta
from edgekv.errors import CheckpointError
from edgekv.models.architecture import Architecture, Ops, WeightPart
from edgekv.models.config import ExpertsConfig, ModelConfig
from edgekv.types import F32, I64, Threads
from edgekv.weights.checkpoint_weights import Weights


def _gelu(x: F32) -> F32:
    erf: F32 = np.asarray(np.frompyfunc(math.erf, 1, 1)(x / math.sqrt(2.0)), np.float32)
    return (0.5 * x * (1.0 + erf)).astype(np.float32)


def _sigmoid(x: F32, factor: F32 | float = 1.0) -> F32:
    with np.errstate(over="ignore"):  # exp(-x) -> inf gives the right limit, 0
        return (factor / (1.0 + np.exp(-x))).astype(np.float32)


def _gelu_tanh(x: F32) -> F32:
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)
    return (0.5 * x * (1.0 + np.tanh(inner))).astype(np.float32)


ACTIVATIONS: dict[str, Callable[[F32], F32]] = {
    "silu": lambda x: _sigmoid(x, factor=x),
    "gelu_tanh": _gelu_tanh,
    "gelu": _gelu,
    "relu": lambda x: np.maximum(x, 0.0),
    "sigmoid": _sigmoid,
}


def clamped_gate(gate: F32, up: F32, alpha: float, limit: float) -> F32:
    """Returns GPT-OSS's gate * sigmoid(alpha * gate) * (up + 1) (n, channels), gate <= limit, |up| <= limit."""
    bound = np.float32(limit)
    gate, up = np.minimum(gate, bound), np.clip(up, -bound, bound)
    result: F32 = _sigmoid(np.float32(alpha) * gate, factor=gate) * (up + 1)
    return result


class LowRank(NamedTuple):
    """A LoRA's change of one part of a linear layer: ``up`` (rows, rank) times ``down`` (rank, columns)."""

    down: F32
    up: F32


Product = Callable[[F32, F32], F32]
"""(x (n, columns), weights (rows, columns)) -> x times the transpose of the weights (n, rows), float32."""

LoraDeltas = Mapping[str, tuple[LowRank, ...]]
"""Linear layer -> the change of each of its parts, of rank 0 where there is none."""


def add_lora(x: F32, y: F32, parts: tuple[LowRank, ...], multiply: Product) -> None:
    """Adds the changes of a linear layer's parts, times x (n, columns), to its outputs y (n, rows)."""
    row = 0
    for down, up in parts:
        end = row + len(up)
        if len(down):
            y[:, row:end] += multiply(multiply(x, down), up)
        row = end


def low_rank(arch: Architecture, deltas: Mapping[str, Delta]) -> dict[str, tuple[LowRank, ...]]:
    """Reads a LoRA's changes. Raises CheckpointError if they are not finite or belong to experts."""
    linears = arch.linears()
    changed = {name: linear for name, linear in linears.items() if any(p.tensor in deltas for p in linear.parts)}
    for name, linear in changed.items():
        if linear.n_experts:
            what = f"the LoRA changes experts ({name}), which is not done beside the weights"
            raise CheckpointError(f"{what}: make a store of both with `edgekv quantize` and it", field="lora")
    return {
        name: tuple(_low_rank(part, deltas.get(part.tensor)) for part in linear.parts)
        for name, linear in changed.items()
    }


def low_rank_bytes(arch: Architecture, deltas: Mapping[str, Delta]) -> int:
    """Returns the bytes of the arrays of `low_rank`."""
    parts = (part for linear in arch.linears().values() for part in linear.parts if part.tensor in deltas)
    return 4 * sum(deltas[part.tensor].a.shape[0] * (part.rows + part.columns) for part in parts)


def _low_rank(part: WeightPart, delta: Delta | None) -> LowRank:
    if delta is None:
        return LowRank(np.zeros((0, part.columns), np.float32), np.zeros((part.rows, 0), np.float32))
    a, b = delta.matrices()
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        what = f"{delta.b.path}: {delta.b.name} is not finite with its factor"
        raise CheckpointError(what, field="lora", advice="give a smaller scale, or another {lora}")
    return LowRank(np.ascontiguousarray(a), np.ascontiguousarray(b))


def choose(logits: F32, experts: ExpertsConfig) -> tuple[I64, F32]:
    """Returns each token's experts (n, k), the likeliest first, and their weights (n, k), by logits (n, experts).

    Of equal logits the first is chosen. NaN comes after all numbers.
    """
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, : experts.per_token]
    largest = np.take_along_axis(logits, chosen[:, :1], axis=1)
    weights: F32 = np.exp(np.take_along_axis(logits, chosen, axis=1) - largest)
    of_all = weights if experts.renormalized else np.exp(logits - largest)
    weights /= of_all.sum(axis=1, keepdims=True)
    return chosen, weights


def apply_gate(config: ModelConfig, both: F32) -> F32:
    """Returns the gated half (m, channels) of an expert's gates and inputs ``both`` (m, 2 * channels)."""
    gate, up = np.split(both, 2, axis=1)
    if config.experts and config.experts.clamped:
        return clamped_gate(gate, up, *config.experts.clamped)
    return ACTIVATIONS[config.activation](gate) * up


def groups(expert_ids: I64) -> Iterator[tuple[int, slice]]:
    """Yields each expert of the pairs' ``expert_ids`` (m,), ascending, and the slice of its pairs."""
    borders = [0, *(np.flatnonzero(np.diff(expert_ids)) + 1).tolist(), len(expert_ids)]
    for a, b in itertools.pairwise(borders):
        yield int(expert_ids[a]), slice(a, b)


class WeightOps(Ops, Protocol):
    """`Ops` over a model's weights; activations are float32 (n, channels), on the host or on the backend's device.

    weights_bytes: bytes of all weights that it reads. lora_bytes: the LoRAs' part of them. threads: threads of its
    products; None: those of NumPy or of a device.
    """

    weights_bytes: int
    lora_bytes: int = 0
    threads: Threads | None = None

    def for_rows(self, n: int) -> WeightOps:
        """Returns the operators for n rows."""
        return self

    def with_lora(self, deltas: LoraDeltas) -> WeightOps:
        """Returns operators on the same weights with LoRAs beside them. Raises ConfigError if it can't."""

    def warm_up(self) -> list[Callable[[], object]]:
        """Returns calls that compile all kernels."""
        return []


class NumpyOps(WeightOps):
    """Operators in NumPy, float32."""

    def __init__(self, weights: Weights) -> None:
        self.weights, self.arch, self.weights_bytes = weights, weights.arch, weights.nbytes
        self.lora: LoraDeltas = {}
        self._linears, self._matrices = weights.arch.linears(), dict[str, F32]()

    def with_lora(self, deltas: LoraDeltas) -> NumpyOps:
        other = copy.copy(self)
        other.lora = deltas
        other.lora_bytes = sum(m.nbytes for parts in deltas.values() for part in parts for m in part)
        other.weights_bytes = self.weights_bytes - self.lora_bytes + other.lora_bytes
        return other

    def linear(self, x: F32, name: str) -> F32:
        """Returns the linear layer's outputs (n, rows) of x (n, columns)."""
        y = self._stored_linear(x, name)
        if name in self.lora:
            add_lora(x, y, self.lora[name], self._multiply)
        return y

    def _multiply(self, x: F32, matrix: F32) -> F32:
        """Multiplies as a `Product`."""
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
            self._matrices[name] = np.ascontiguousarray(self.weights.matrix(name))
        return self._matrices[name]

    def add_linear(self, x: F32, y: F32, name: str) -> F32:
        """Returns x plus the linear layer's outputs of y (n, columns)."""
        return x + self.linear(y, name)

    def rms_norm(self, x: F32, name: str, eps: float) -> F32:
        """Returns x (n, channels), normed by its rows' root mean squares."""
        mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
        normed: F32 = x / np.sqrt(mean_square + np.float32(eps)) * self.weights.vector(name)
        return normed

    def layer_norm(self, x: F32, name: str, eps: float) -> F32:
        """Returns x (n, channels), normed by its rows' means and deviations."""
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = np.mean(np.square(centred), axis=-1, keepdims=True)
        normed = centred / np.sqrt(variance + np.float32(eps))
        scaled: F32 = normed * self.weights.vector(f"{name}.weight") + self.weights.vector(f"{name}.bias")
        return scaled

    def activation(self, x: F32, kind: str) -> F32:
        """Returns the activation of each number of x (n, channels)."""
        return ACTIVATIONS[kind](x)

    def gated_linear(self, x: F32, name: str, kind: str) -> F32:
        """Returns activation(gate) * up (n, rows / 2) of a linear layer's two halves."""
        gate, up = np.split(self.linear(x, name), 2, axis=-1)
        return self.activation(gate, kind) * up

    def split(self, x: F32, sizes: Sequence[int]) -> list[F32]:
        """Cuts x (n, channels) into parts (n, size) each."""
        return np.split(x, np.cumsum(sizes)[:-1], axis=-1)

    def join(self, parts: Sequence[F32]) -> F32:
        """Puts parts (n, channels) side by side."""
        return np.concatenate(parts, axis=-1)

    def add(self, a: F32, b: F32) -> F32:
        """Returns a + b (n, channels)."""
        return a + b

    def mul(self, a: F32, b: F32) -> F32:
        """Returns a * b (n, channels)."""
        return a * b

    def scale(self, x: F32, factor: float) -> F32:
        """Returns x (n, channels) times a number."""
        scaled: F32 = x * np.float32(factor)
        return scaled

    def soft_cap(self, x: F32, cap: float) -> F32:
        """Returns cap * tanh(x / cap) (n, channels)."""
        capped: F32 = np.tanh(x / np.float32(cap)) * np.float32(cap)
        return capped

    def add_experts(self, x: F32, y: F32, i: int) -> F32:
        """Returns x (n, hidden) plus what layer i's experts make of y (n, hidden), weighted by the router.

        A pair is a token and one of its experts. Pairs are ordered by expert, so that one that several tokens have
        chosen is read once for all of them.
        """
        experts = self.arch.config.experts_of(i)
        assert experts is not None
        chosen, weights = choose(self.linear(y, f"{i}.router"), experts)
        order = np.argsort(chosen, axis=None, kind="stable")
        expert_ids = chosen.reshape(-1)[order]
        both = self.expert_products(y[order // experts.per_token], expert_ids, f"{i}.experts_up")
        results = self.expert_products(apply_gate(self.arch.config, both), expert_ids, f"{i}.experts_down")
        by_token = np.empty_like(results)
        by_token[order] = results
        added = np.matmul(weights[:, None], by_token.reshape(len(x), experts.per_token, -1))[:, 0]
        summed: F32 = np.add(x, added, dtype=np.float32)
        return summed

    def expert_products(self, rows: F32, expert_ids: I64, name: str) -> F32:
        """Returns outputs (m, n) of rows (m, columns), each through its expert in expert_ids (m,), ascending."""
        matrices, bias = self._matrix(name), self.weights.bias(name)
        n = len(matrices) // self._linears[name].n_experts
        result = np.empty((len(rows), n), np.float32)
        for expert, pairs in groups(expert_ids):
            outputs = slice(expert * n, (expert + 1) * n)
            result[pairs] = self._multiply(rows[pairs], matrices[outputs])
            if bias is not None:
                result[pairs] += bias[outputs]
        return result
