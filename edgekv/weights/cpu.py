"""The operators on the CPU's cores: products read the store's mapped weights as they are, in 4, 8 or 32 bits."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from edgekv.kernels.cpu import layers
from edgekv.kernels.cpu.gemm import OUTPUTS, CodeLayout
from edgekv.kernels.cpu.matmul import (
    FEW_ROWS,
    QuantizedMatmul,
    QuantizedWeights,
    float_matmul,
    multiply_rows,
)
from edgekv.machine import available_memory_bytes
from edgekv.types import F32, I64, Threads
from edgekv.weights.formats import ROUTER
from edgekv.weights.ops import NumpyOps, gated, groups
from edgekv.weights.store import WeightStore

FEW_PAIRS = 32  # those of a token, or of a few


class StoredLinear(NamedTuple):
    """A linear layer as it is read."""

    product: Callable[[F32, int], F32]
    """(rows, threads) -> their products."""
    bias: F32 | None


class CpuOps(NumpyOps):
    """Kernels where the reference has NumPy.

    Of a mixture's mapped file only the rows of the chosen experts are read. Where memory has no room for all of
    them, the system is told which: by itself it reads ahead, beyond a chosen expert, and would read most of the
    others too.
    """

    def __init__(self, store: WeightStore, threads: Threads) -> None:
        super().__init__(store)
        self._store, self._threads, self.threads = store, threads, threads
        self._stored: dict[str, StoredLinear] = {}
        self._vectors: dict[str, F32] = {}
        self._is_cold = store.nbytes > available_memory_bytes()
        experts = {name: linear.n_experts for name, linear in self._linears.items() if linear.n_experts}
        self._experts = {
            name: QuantizedMatmul(stored_weights(store, name), n)
            for name, n in experts.items()
            if store.form.of(name).bits < 32 and self._linears[name].rows // n >= OUTPUTS
        }
        for name in experts if self._is_cold else ():
            self._advise(name, mmap.MADV_RANDOM)

    def warm_up(self) -> list[Callable[[], object]]:
        """A row through a layer of each kind, by the formats of its weights, and through the head."""
        first: dict[tuple[object, ...], int] = {}
        for i in range(self.arch.config.n_layers):
            linears = self.arch.layer_linears(i)
            kind = ((name.partition(".")[2], self._store.form.of(name)) for name in linears)
            first.setdefault((self.arch.widths(i), *kind), i)
        row = np.zeros((1, self.arch.config.hidden_size), np.float32)
        layers = [functools.partial(self._run_layer, i, row) for i in first.values()]
        return [*layers, lambda: self.arch.head(self, row)]

    def _run_layer(self, i: int, row: F32) -> None:
        self.arch.attention_in(self, i, row)
        self.arch.attention_out(self, i, row, np.zeros((1, self.arch.widths(i)[1]), np.float32))

    def _multiply(self, x: F32, matrix: F32) -> F32:
        return float_matmul(x, matrix, self._threads)

    def _stored_linear(self, x: F32, name: str) -> F32:
        if name not in self._stored:
            self._stored[name] = self._open(name)
        product, bias = self._stored[name]
        y = product(x, self._threads.decode if len(x) <= FEW_ROWS else self._threads.prompt)
        if bias is not None:
            y += bias
        return y

    def _open(self, name: str) -> StoredLinear:
        """Matrices with too few outputs for the kernels become float32.

        A router's rows are multiplied each as if it were alone, also in a prompt.
        """
        store, bits = self._store, self._store.form.of(name).bits
        if bits < 32 and self._linears[name].rows >= OUTPUTS:
            return StoredLinear(QuantizedMatmul(stored_weights(store, name)), store.bias(name))
        matrix = self._matrix(name)
        if name.endswith(ROUTER):
            return StoredLinear(lambda x, n_threads: multiply_rows(x, matrix, n_threads), store.bias(name))
        return StoredLinear(lambda x, n_threads: self._multiply(x, matrix), store.bias(name))

    def add_linear(self, x: F32, y: F32, name: str) -> F32:
        """Return x plus the linear layer's outputs of y (n, columns)."""
        total = self.linear(y, name)
        total += x
        return total

    def rms_norm(self, x: F32, name: str, eps: float) -> F32:
        """Return x (n, channels), normed by its rows' root mean squares."""
        return layers.rms_norm(x, self._vector(name), eps)

    def layer_norm(self, x: F32, name: str, eps: float) -> F32:
        """Return x (n, channels), normed by its rows' means and deviations."""
        return layers.layer_norm(x, self._vector(f"{name}.weight"), self._vector(f"{name}.bias"), eps)

    def _vector(self, name: str) -> F32:
        if name not in self._vectors:
            self._vectors[name] = np.ascontiguousarray(self.weights.vector(name))
        return self._vectors[name]

    def activation(self, x: F32, kind: str) -> F32:
        """Return the activation of each number of x (n, channels)."""
        return layers.activation(x, kind) if kind in (*layers.SIGMOIDS, "gelu") else super().activation(x, kind)

    def gated_linear(self, x: F32, name: str, kind: str) -> F32:
        """Return activation(gate) * up (n, rows / 2) of a linear layer's two halves."""
        if kind not in layers.SIGMOIDS:
            return super().gated_linear(x, name, kind)
        return layers.gated(self.linear(x, name), kind)

    def add_experts(self, x: F32, y: F32, i: int) -> F32:
        """Return x (n, hidden) plus what layer i's experts make of y (n, hidden)."""
        config = self.arch.config
        experts = config.experts_of(i)
        assert experts is not None
        logits = self.linear(y, f"{i}.router")
        of, tokens, weights = layers.route(logits, experts.per_token, experts.renormalized)
        both = self.expert_products(y.take(tokens, axis=0), of, f"{i}.experts_up")
        if experts.clamped:
            inner = layers.clamped_gate(both, *experts.clamped)
        elif config.activation in layers.SIGMOIDS:
            inner = layers.gated(both, config.activation)
        else:
            inner = gated(config, both)
        results = self.expert_products(inner, of, f"{i}.experts_down")
        return layers.add_results(x, results, tokens, weights)

    def expert_products(self, rows: F32, of: I64, name: str) -> F32:
        """Return (m, rows of one expert) of rows (m, columns) and their experts (m,), ascending."""
        for expert, _ in groups(of) if self._is_cold else ():
            self._advise(name, mmap.MADV_WILLNEED, expert)
        if name not in self._experts:
            return super().expert_products(rows, of, name)
        n_threads = self._threads.decode if len(rows) <= FEW_PAIRS else self._threads.prompt
        result = self._experts[name](rows, n_threads, of)
        bias = self._store.bias(name)
        if bias is not None:
            result += bias.reshape(self._linears[name].n_experts, -1)[of]
        return result

    def _advise(self, name: str, advice: int, expert: int | None = None) -> None:
        """Of one expert's rows, or of all."""
        n = self._linears[name].rows // self._linears[name].n_experts
        place = (0, None) if expert is None else (expert * n, n)
        for part in self._store.arrays(name):
            self._store.advise(f"{name}.{part}", advice, *place)


def stored_weights(store: WeightStore, name: str) -> QuantizedWeights:
    """Map the weights of a linear layer in fewer than 32 bits, with their zero points or offsets."""
    form = store.form.of(name)
    arrays = {part: np.ascontiguousarray(array) for part, array in store.arrays(name).items()}
    return QuantizedWeights(layout=CodeLayout(form.bits, form.block, form.e2m1), **arrays)
