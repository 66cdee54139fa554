"""Packed weights of a store as the CPU's products take them: mapped, with their zero points or offsets."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from edgekv.kernels.cpu.product_rows import CodeLayout
from edgekv.kernels.cpu.product_shifts import SHIFT
from edgekv.kernels.cpu.product_weights import PackedWeights
from edgekv.linear.formats import WeightFormat
from edgekv.linear.store import WeightStore


def product_layout(form: WeightFormat) -> CodeLayout:
    """How kernels have a format of fewer than 32 bits."""
    return CodeLayout(form.bits, form.block, form.e2m1)


def weight_parts(form: WeightFormat) -> tuple[str, ...]:
    """What a linear layer's weights are in the store, but for its bias."""
    if form.bits == 32:
        return ("weight",)
    shift = ("offsets",) if form.offsets else ("zeros",) if form.zeros else ()
    return ("codes", "scales", *shift)


def stored_weights(store: WeightStore, name: str) -> PackedWeights:
    """Of a linear layer in fewer than 32 bits."""
    form = store.form.of(name)
    arrays = {part: np.ascontiguousarray(store.raw(f"{name}.{part}")) for part in weight_parts(form)}
    return PackedWeights(layout=product_layout(form), **arrays)


def shift_kernels(forms: Iterable[WeightFormat]) -> list[Callable[[], object]]:
    """What is to be called so that the kernel for zero points and offsets is compiled, if a format has them."""
    return [lambda: SHIFT.address] if any(form.zeros or form.offsets for form in forms) else []
