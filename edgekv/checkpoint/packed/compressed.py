"""compressed-tensors, of weights alone (w4a16, w8a16): whole numbers, packed or in bytes, and FP8.

Source of the layouts: the compressed-tensors package, formats pack-quantized, int-quantized, float-quantized.
"""

from __future__ import annotations

import numpy as np

from edgekv.checkpoint.packed.float8 import float8
from edgekv.checkpoint.packed.parts import Parts, Quantization
from edgekv.checkpoint.packed.tensors import Codes, Grouped, Packed, unpack
from edgekv.checkpoint.tensors import to_float32
from edgekv.types import F32


class Compressed(Grouped):
    """pack-quantized: (rows, columns packed), offset by half the range, scales (rows, groups)."""

    def __init__(self, parts: Parts, module: str) -> None:
        self._words = parts.words(f"{module}.weight_packed")
        rows, columns = (int(n) for n in parts.shaped(f"{module}.weight_shape", (2,)).astype(np.int64))
        self._scales = parts.matrix(f"{module}.weight_scale")
        width, groups = self._words.shape[1], self._scales.shape[1]
        bits = next((b for b in (4, 8) if -(-columns * b // 32) == width), 0)
        if not bits or len(self._words) != rows or len(self._scales) != rows or columns % groups:
            raise parts.wrong(f"{module}.weight_packed", f"{rows} rows of {columns} columns in 4 or 8 bits")
        self._bits, self._half = bits, np.int16(1 << (bits - 1))
        self._zeros = self._zero_points(parts, module, groups)
        group_of = parts.group_of(f"{module}.weight_g_idx", columns, groups)
        self.kind = f"compressed-tensors {bits}-bit" + (" act-order" if group_of is not None else "")
        endings = (".weight_packed", ".weight_shape", ".weight_scale", ".weight_zero_point", ".weight_g_idx")
        names = parts.beside(module, *endings)
        super().__init__((rows, columns), names, bits, columns // groups, self._zeros, group_of)

    def _zero_points(self, parts: Parts, module: str, groups: int) -> Codes | None:
        """(rows, groups) around 0; packed along the rows."""
        name = f"{module}.weight_zero_point"
        if name not in parts.tensors:
            return None
        rows = len(self._words)
        packed = parts.words(name)
        if packed.shape != (-(-rows * self._bits // 32), groups):
            raise parts.wrong(name, f"{rows} rows of {groups} groups in {self._bits} bits")
        zeros: Codes = unpack(np.ascontiguousarray(packed.T), self._bits).T[:rows] - self._half
        return zeros

    def codes(self, lo: int, hi: int) -> Codes:
        codes: Codes = unpack(self._words[lo:hi], self._bits)[:, : self.shape[1]] - self._half
        if self._zeros is not None:
            codes -= self._zeros[lo:hi][:, self._columns]
        return codes

    def zero_points(self, lo: int, hi: int) -> Codes:
        return super().zero_points(lo, hi) if self._zeros is None else self._zeros[lo:hi]

    def scales(self, lo: int, hi: int) -> F32:
        return to_float32(np.ascontiguousarray(self._scales[lo:hi]))


class WholeBytes(Grouped):
    """int-quantized: int8 weights, one scale per row."""

    def __init__(self, parts: Parts, module: str) -> None:
        if parts.beside(module, ".weight_zero_point"):
            raise parts.wrong(f"{module}.weight_zero_point", "none: symmetric weights")
        self._codes = parts.matrix(f"{module}.weight")
        rows, columns = self._codes.shape
        self._scales = parts.shaped(f"{module}.weight_scale", (rows, 1), (rows,)).reshape(rows, 1)
        self.kind = "compressed-tensors 8-bit"
        super().__init__(
            (rows, columns), [f"{module}.weight", f"{module}.weight_scale"], 8, -(-columns // 128) * 128, None
        )

    def codes(self, lo: int, hi: int) -> Codes:
        return self._codes[lo:hi].astype(np.int16)

    def scales(self, lo: int, hi: int) -> F32:
        return to_float32(np.ascontiguousarray(self._scales[lo:hi]))


def compressed(parts: Parts, settings: Quantization) -> dict[str, Packed]:
    """All that compressed-tensors writes of weights alone; told apart by the tensors."""
    found = float8(parts, settings)
    found |= {f"{m}.weight": Compressed(parts, m) for m in parts.named(".weight_packed")}
    for module in parts.named(".weight_scale"):
        info = parts.tensors.info(f"{module}.weight") if f"{module}.weight" in parts.tensors else None
        if info is not None and info.dtype == "I8" and len(info.shape) == 2:
            found[f"{module}.weight"] = WholeBytes(parts, module)
    return found
