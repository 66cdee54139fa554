"""Products with the experts of a weight store: of the mapped file only the rows of the chosen ones are read.

Where memory has no room for all of them, the system is told which: by itself it reads ahead, beyond a chosen
expert, and would read most of the others too.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable

from edgekv.kernels.cpu import layers, routing
from edgekv.kernels.cpu.chosen_products import ChosenProduct, warm_up
from edgekv.kernels.cpu.float_products import FloatProducts
from edgekv.kernels.cpu.product_rows import OUTPUTS
from edgekv.linear.experts import Gate, expert_rows, gated, groups
from edgekv.linear.store import WeightStore
from edgekv.linear.stored_weights import product_layout, shift_kernels, stored_weights, weight_parts
from edgekv.machine import available_memory_bytes
from edgekv.models.config import ModelConfig
from edgekv.types import F32, I64, Threads

FEW_PAIRS = 32  # those of a token, or of a few


class StoredExperts:
    """The experts of every layer, by kernels; called, an `ExpertProduct` of the store's own codes."""

    def __init__(self, store: WeightStore, threads: Threads) -> None:
        self._store, self._threads, config = store, threads, store.arch.config
        self._multiply = FloatProducts(threads)
        self._experts, self._gate = config.experts, kernel_gate(config)
        linears = {name: linear for name, linear in store.arch.linears().items() if linear.n_experts}
        self._n_experts = {name: linear.n_experts for name, linear in linears.items()}
        self._outputs = {name: linear.rows // linear.n_experts for name, linear in linears.items()}
        self._biases = {name: store.bias(name) for name in linears}
        self._forms = {name: store.form.of(name) for name in linears}
        packed = [name for name, form in self._forms.items() if form.bits < 32 and self._outputs[name] >= OUTPUTS]
        self._products = {
            name: ChosenProduct(stored_weights(store, name), self._n_experts[name]) for name in packed
        }
        self._is_cold = store.nbytes > available_memory_bytes()
        for name in linears if self._is_cold else ():
            self._advise(name, mmap.MADV_RANDOM)

    def __call__(self, rows: F32, of: I64, name: str) -> F32:
        bias, n_experts, n = self._biases[name], self._n_experts[name], self._outputs[name]
        for expert, _ in groups(of) if self._is_cold else ():
            self._advise(name, mmap.MADV_WILLNEED, expert)
        if name not in self._products:
            return expert_rows(rows, of, self._store.matrix(name), bias, n_experts, self._multiply)
        n_threads = self._threads.decode if len(rows) <= FEW_PAIRS else self._threads.prompt
        result = self._products[name](rows, of, n_threads)
        if bias is not None:
            result += bias.reshape(n_experts, n)[of]
        return result

    def add(self, x: F32, y: F32, logits: F32, i: int) -> F32:
        """As `experts.add_experts`: x (n, hidden) plus what layer i's experts make of y (n, hidden)."""
        assert self._experts
        of, tokens, weights = routing.route(logits, self._experts.per_token, self._experts.renormalized)
        inner = self._gate(self(y.take(tokens, axis=0), of, f"{i}.experts_up"))
        results = self(inner, of, f"{i}.experts_down")
        return routing.add_results(x, results, tokens, weights)

    def warm_up(self) -> list[Callable[[], object]]:
        """What is to be called so that all kernels are compiled."""
        if not self._experts:
            return []
        layouts = {product_layout(form) for form in self._forms.values() if form.bits < 32}
        products = [functools.partial(warm_up, layout) for layout in layouts]
        return [*products, *shift_kernels(self._forms.values()), routing.warm_up, layers.warm_up]

    def _advise(self, name: str, advice: int, expert: int | None = None) -> None:
        """Of one expert's rows, or of all."""
        n = self._outputs[name]
        place = (0, None) if expert is None else (expert * n, n)
        for part in weight_parts(self._forms[name]):
            self._store.advise(f"{name}.{part}", advice, *place)


def kernel_gate(config: ModelConfig) -> Gate:
    """`gated` by a kernel, where there is one for the activation."""
    if config.experts and config.experts.clamped:
        alpha, limit = config.experts.clamped
        return lambda both: layers.clamped_gate(both, alpha, limit)
    if config.activation in layers.GATED:
        return functools.partial(layers.gated, kind=config.activation)
    return functools.partial(gated, config)
