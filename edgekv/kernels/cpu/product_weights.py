"""Packed weights as products get them: addresses and sizes, taken once."""

from __future__ import annotations

from typing import NamedTuple

from edgekv.kernels.cpu.loops import address_of
from edgekv.kernels.cpu.product_rows import CodeLayout
from edgekv.kernels.cpu.product_shifts import SHIFT
from edgekv.types import F32, U8


class WeightNumbers(NamedTuple):
    """The last fields of a `Product`, which says what they are."""

    blocks: int
    gap: int
    codes: int
    row_bytes: int
    scales: int
    offsets: int
    zeros: int
    shift: int


class PackedWeights(NamedTuple):
    """Weights (outputs, columns) in blocks of a format, as `edgekv.linear.quantize` packs them.

    What is left of the last block of an output is padding. At most one of offsets and zeros is there.
    """

    codes: U8  # (outputs, blocks, layout.block_bytes)
    scales: F32  # (outputs, blocks)
    layout: CodeLayout
    offsets: F32 | None = None  # (outputs, blocks)
    zeros: U8 | None = None  # (outputs, (blocks + 1) // 2), two zero points to a byte

    def at(self) -> WeightNumbers:
        """They must stay alive. Raises ValueError for offsets or zeros that products in the format do not know."""
        layout, blocks = self.layout, self.scales.shape[1]
        shifts = self.offsets is not None or self.zeros is not None
        if shifts and not layout.can_shift:
            raise ValueError(f"weights in {layout} with zero points or offsets; accepted: whole numbers of 4 bits")
        return WeightNumbers(
            blocks,
            layout.gap(blocks),
            address_of(self.codes),
            layout.block_bytes * blocks,
            address_of(self.scales),
            0 if self.offsets is None else address_of(self.offsets),
            0 if self.zeros is None else address_of(self.zeros),
            SHIFT.address if shifts else 0,
        )
