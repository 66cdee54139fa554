"""FP8 weights as transformers' fine-grained FP8, fbgemm and compressed-tensors write them."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from edgekv.checkpoint.packed.parts import Parts, Quantization
from edgekv.checkpoint.packed.tensors import Packed
from edgekv.checkpoint.tensors import to_float32
from edgekv.types import F32


class Float8(Packed):
    """e4m3 numbers times a scale: one for all, one per row, or one per block of rows and columns."""

    kind = "FP8"

    def __init__(self, parts: Parts, module: str, ending: str, sides: list[int] | None) -> None:
        self._bytes = parts.tensors.bytes_of(f"{module}.weight")
        if self._bytes.ndim != 2 or not self._bytes.size:
            raise parts.wrong(f"{module}.weight", "a matrix")
        rows, columns = self._bytes.shape
        high, wide = sides or (128, 128)
        scale = to_float32(parts.tensors.array(f"{module}{ending}"))
        if scale.size == 1:
            high, wide, scale = rows, columns, scale.reshape(1, 1)
        elif scale.shape in ((rows,), (rows, 1)):
            high, wide, scale = 1, columns, scale.reshape(rows, 1)
        elif scale.shape != (-(-rows // high), -(-columns // wide)):
            raise parts.wrong(f"{module}{ending}", f"a scale per {high} rows and {wide} columns")
        self._scale, self._high, self._wide = scale, high, wide
        super().__init__((rows, columns), [f"{module}.weight", f"{module}{ending}"])

    def values(self, lo: int, hi: int) -> F32:
        numbers = self._bytes[lo:hi].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        rows, columns = np.arange(lo, hi) // self._high, np.arange(self.shape[1]) // self._wide
        values: F32 = numbers * self._scale[rows][:, columns]
        return values


def float8(parts: Parts, settings: Quantization) -> dict[str, Packed]:
    """weight in e4m3 and weight_scale_inv (a factor in spite of its name), or weight_scale."""
    found: dict[str, Packed] = {}
    for ending in (".weight_scale_inv", ".weight_scale"):
        for module in parts.named(ending):
            weight = f"{module}.weight"
            if weight in parts.tensors and parts.tensors.info(weight).dtype == "F8_E4M3":
                found[f"{module}.weight"] = Float8(parts, module, ending, settings.weight_block_size)
    return found
