"""Packed weights as products get them: addresses and sizes, taken once."""

from __future__ import annotations

from typing import NamedTuple

from edgekv.kernels.cpu.loops import address_of
from edgekv.kernels.cpu.product_rows import CodeLayout
from edgekv.kernels.cpu.product_shifts import SHIFT
from edgekv.types import F32, U8


class WeightsAt(NamedTuple):
    """The last fields of a `Product`."""

    blocks: int
    gap: int
    codes: int
    row_bytes: int
    scales: int
    offsets: int
    zeros: int
    shift: int

    def from_row(self, row: int) -> WeightsAt:
        """The same without the rows before one."""
        floats = 4 * row * self.blocks
        return self._replace(
            codes=self.codes + row * self.row_bytes,
            scales=self.scales + floats,
            offsets=self.offsets and self.offsets + floats,
            zeros=self.zeros and self.zeros + row * ((self.blocks + 1) // 2),
        )


class PackedWeights(NamedTuple):
    """Weights (rows, columns): codes, scales, and maybe offsets or zeros, as `edgekv.linear.quantize` has them."""

    codes: U8
    scales: F32
    layout: CodeLayout
    offsets: F32 | None = None
    zeros: U8 | None = None

    def at(self) -> WeightsAt:
        """They must stay alive. Raises ValueError for offsets or zeros that products in the format do not know."""
        layout, blocks = self.layout, self.scales.shape[1]
        shifts = self.offsets is not None or self.zeros is not None
        if shifts and not layout.can_shift:
            raise ValueError(f"weights in {layout} with zero points or offsets; accepted: whole numbers of 4 bits")
        return WeightsAt(
            blocks,
            layout.gap(blocks),
            address_of(self.codes),
            layout.block_bytes * blocks,
            address_of(self.scales),
            0 if self.offsets is None else address_of(self.offsets),
            0 if self.zeros is None else address_of(self.zeros),
            SHIFT.address if shifts else 0,
        )
