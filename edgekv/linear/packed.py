"""Linear layers of 4 and 8 bits on the CPU: products read the store's mapped weights as they are packed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from edgekv.kernels.cpu import float_products, layers, products
from edgekv.kernels.cpu.float_products import FloatProducts, multiply_rows
from edgekv.kernels.cpu.product_rows import OUTPUTS
from edgekv.kernels.cpu.products import PackedProduct
from edgekv.linear.formats import ROUTER
from edgekv.linear.reference import NumpyLinear, NumpyOps
from edgekv.linear.store import WeightStore
from edgekv.linear.stored_experts import StoredExperts
from edgekv.linear.stored_weights import product_layout, shift_kernels, stored_weights
from edgekv.types import F32, Threads


class Packed(NamedTuple):
    """A linear layer as it is read."""

    product: Callable[[F32, int], F32]
    """(rows, threads) -> their products."""
    bias: F32 | None


class PackedOps(NumpyOps):
    """Operators that compute at once, with kernels where the reference has NumPy."""

    def __init__(self, store: WeightStore, threads: Threads) -> None:
        super().__init__(store)
        self._store, self._threads = store, threads
        self._packed: dict[str, Packed | None] = {}
        self._vectors: dict[str, F32] = {}
        self.experts = StoredExperts(store, threads)
        self._float_products = FloatProducts(threads)

    def _multiply(self, x: F32, matrix: F32) -> F32:
        return self._float_products(x, matrix)

    def _stored_linear(self, x: F32, name: str) -> F32:
        if name not in self._packed:
            self._packed[name] = self._open(name)
        packed = self._packed[name]
        if packed is None:
            return super()._stored_linear(x, name)
        n_threads = self._threads.decode if len(x) <= products.FEW_ROWS else self._threads.prompt
        y = packed.product(x, n_threads)
        if packed.bias is not None:
            y += packed.bias
        return y

    def add_linear(self, x: F32, y: F32, name: str) -> F32:
        total = self.linear(y, name)
        total += x
        return total

    def rms_norm(self, x: F32, name: str, eps: float) -> F32:
        if name not in self._vectors:
            self._vectors[name] = np.ascontiguousarray(self.weights.vector(name))
        return layers.rms_norm(np.ascontiguousarray(x), self._vectors[name], eps)

    def gated_linear(self, x: F32, name: str, kind: str) -> F32:
        if kind not in layers.GATED:
            return super().gated_linear(x, name, kind)
        return layers.gated(self.linear(x, name), kind)

    def add_experts(self, x: F32, y: F32, i: int) -> F32:
        return self.experts.add(x, y, self.linear(y, f"{i}.router"), i)

    def _open(self, name: str) -> Packed | None:
        """None: float32, or too few outputs for the kernels. A router's rows are each alone, also in a prompt."""
        store, form = self._store, self._store.form.of(name)
        if name.endswith(ROUTER):
            matrix = self._matrix(name)
            return Packed(lambda x, n_threads: multiply_rows(x, matrix, n_threads), store.bias(name))
        if form.bits == 32:
            return None
        weights = stored_weights(store, name)
        if len(weights.scales) < OUTPUTS:
            return None
        return Packed(PackedProduct(weights), store.bias(name))


class PackedLinear(NumpyLinear):
    """The three blocks of every layer over a store's mapped weights."""

    def __init__(self, store: WeightStore, threads: Threads) -> None:
        super().__init__(store)
        ops = PackedOps(store, threads)
        self._ops, self._experts, self._forms = ops, ops.experts, store.form
        self.weights_bytes, self.threads = store.nbytes, threads

    def warm_up(self) -> list[Callable[[], object]]:
        linears = self.arch.linears()
        forms = {self._forms.of(name) for name in linears if not linears[name].n_experts}
        layouts = {product_layout(form) for form in forms if form.bits < 32}
        kernels = [functools.partial(products.warm_up, layout) for layout in layouts]
        return [*kernels, *shift_kernels(forms), *self._experts.warm_up(), layers.warm_up, float_products.warm_up]

    @classmethod
    def block(cls, store: WeightStore, name: str, threads: int) -> Callable[..., F32]:
        """The first layer's ``attention_in`` or ``attention_out``, on so many threads."""
        return functools.partial(getattr(cls(store, Threads(threads, threads)), name), 0)
