"""Products with the experts of a weight store: of the mapped file only the rows of the chosen ones are read.

Where memory has no room for all of them, the system is told which: by itself it reads ahead, beyond a chosen
expert, and would read most of the others too.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable

from edgekv.kernels.cpu.chosen_products import multiply_chosen, warm_up
from edgekv.kernels.cpu.product_rows import Layout
from edgekv.kernels.cpu.products import OUTPUTS
from edgekv.linear.experts import expert_rows, groups
from edgekv.linear.formats import WeightFormat
from edgekv.linear.quantize import block_sums
from edgekv.linear.store import WeightStore
from edgekv.machine import available_memory_bytes
from edgekv.types import F32, I64, Array, Threads

FEW_PAIRS = 32  # those of a token, or of a few


class StoredExperts:
    """An `ExpertProduct` of the store's own codes."""

    def __init__(self, store: WeightStore, threads: Threads) -> None:
        self._store, self._threads = store, threads
        linears = {name: linear for name, linear in store.arch.linears().items() if linear.n_experts}
        self._n_experts = {name: linear.n_experts for name, linear in linears.items()}
        self._biases = {name: store.bias(name) for name in linears}
        self._forms = {name: store.form.of(name) for name in linears}
        self._arrays = {name: _arrays(store, name, form) for name, form in self._forms.items()}
        self._is_cold = store.nbytes > available_memory_bytes()
        for name in linears if self._is_cold else ():
            self._advise(name, mmap.MADV_RANDOM)

    def __call__(self, rows: F32, of: I64, name: str) -> F32:
        form, bias, n_experts = self._forms[name], self._biases[name], self._n_experts[name]
        for expert, _ in groups(of) if self._is_cold else ():
            self._advise(name, mmap.MADV_WILLNEED, expert)
        if form.bits == 32:
            return expert_rows(rows, of, self._arrays[name][0], bias, n_experts)
        codes, scales = self._arrays[name]
        n = len(codes) // n_experts
        if n < OUTPUTS:
            return expert_rows(rows, of, self._store.matrix(name), bias, n_experts)
        n_threads = self._threads.decode if len(rows) <= FEW_PAIRS else self._threads.prompt
        result = multiply_chosen(rows, of, codes, scales, n_experts, product_layout(form), n_threads)
        if form.zeros or form.offsets:
            self._add_shift(rows, of, name, form, result)
        if bias is not None:
            result += bias.reshape(n_experts, n)[of]
        return result

    def warm_up(self) -> list[Callable[[], object]]:
        """What is to be called so that all kernels are compiled."""
        layouts = {product_layout(form) for form in self._forms.values() if form.bits < 32}
        return [functools.partial(warm_up, layout) for layout in layouts]

    def _advise(self, name: str, advice: int, expert: int | None = None) -> None:
        """Of one expert's rows, or of all."""
        for part, array in zip(_parts(self._forms[name]), self._arrays[name], strict=True):
            n = len(array) // self._n_experts[name]
            place = (0, None) if expert is None else (expert * n, n)
            self._store.advise(f"{name}.{part}", advice, *place)

    def _add_shift(self, rows: F32, of: I64, name: str, form: WeightFormat, result: F32) -> None:
        """What zero points or offsets add to the weights of each block, times the sum of its inputs."""
        sums, n = block_sums(rows, form.block), result.shape[1]
        for expert, pairs in groups(of):
            shift = self._store.shift(name, slice(expert * n, (expert + 1) * n))
            if shift is not None:
                result[pairs] += sums[pairs] @ shift.T


def _arrays(store: WeightStore, name: str, form: WeightFormat) -> list[Array]:
    return [store.raw(f"{name}.{part}") for part in _parts(form)]


def _parts(form: WeightFormat) -> tuple[str, ...]:
    return ("weight",) if form.bits == 32 else ("codes", "scales")


def product_layout(form: WeightFormat) -> Layout:
    """How kernels have a format of fewer than 32 bits: zero points and offsets are added to what they give."""
    return Layout(form.bits, form.block, form.e2m1)
