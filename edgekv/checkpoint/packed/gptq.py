"""GPTQ and AWQ: the matrix lies transposed, with zero points and scales per group of its columns.

Sources of the layouts: AutoGPTQ, GPTQModel, AutoAWQ.
"""

from __future__ import annotations

import numpy as np

from edgekv.checkpoint.packed.parts import Parts, Quantization, width
from edgekv.checkpoint.packed.tensors import Codes, Grouped, Packed, unpack
from edgekv.checkpoint.tensors import to_float32
from edgekv.errors import ConfigError
from edgekv.schema import shown
from edgekv.types import F32

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the columns in a word, from the low bits on


class Transposed(Grouped):
    """GPTQ's and AWQ's: (columns, rows), zero points and scales (groups, rows)."""

    def __init__(self, parts: Parts, module: str, kind: str, bits: int, order: tuple[int, ...] | None, add: int):
        """order: of the numbers in a word of rows (None: the words go along the columns). add: to zero points."""
        self._per_word, self._bits, self._order = 32 // bits, bits, order
        self._words = parts.words(f"{module}.qweight")
        zeros = parts.words(f"{module}.qzeros")
        rows, columns = self._words.shape[1], self._words.shape[0]
        rows, columns = (rows, columns * self._per_word) if order is None else (rows * self._per_word, columns)
        groups = len(zeros)
        if columns % groups:
            raise parts.wrong(f"{module}.qzeros", f"rows that divide {columns} columns")
        parts.shaped(f"{module}.qzeros", (groups, rows // self._per_word))
        self._scales = parts.shaped(f"{module}.scales", (groups, rows))
        self._zeros = unpack(zeros, bits, order) + np.int16(add)
        self._half = np.int16(1 << (bits - 1))
        group_of = parts.group_of(f"{module}.g_idx", columns, groups)
        self.kind = f"{kind} {bits}-bit" + (" act-order" if group_of is not None else "")
        names = parts.beside(module, ".qweight", ".qzeros", ".scales", ".g_idx")
        super().__init__((rows, columns), names, bits, columns // groups, self._zeros - self._half, group_of)

    def codes(self, lo: int, hi: int) -> Codes:
        if self._order is None:
            numbers = unpack(np.ascontiguousarray(self._words[:, lo:hi].T), self._bits)
        else:
            first, stop = lo // self._per_word, -(-hi // self._per_word)
            whole = unpack(np.ascontiguousarray(self._words[:, first:stop]), self._bits, self._order)
            start = lo - first * self._per_word
            numbers = whole[:, start : start + hi - lo].T
        codes: Codes = numbers - self._zeros[:, lo:hi].T[:, self._columns]
        return codes

    def zero_points(self, lo: int, hi: int) -> Codes:
        zeros: Codes = (self._zeros[:, lo:hi] - self._half).T
        return zeros

    def scales(self, lo: int, hi: int) -> F32:
        return to_float32(np.ascontiguousarray(self._scales[:, lo:hi].T))


def gptq(parts: Parts, settings: Quantization) -> dict[str, Packed]:
    """qweight (columns packed, rows); zero points are stored less 1, but for checkpoint_format gptq_v2."""
    bits, add = width(settings, "gptq", 4, 8), 0 if settings.checkpoint_format == "gptq_v2" else 1
    return {f"{m}.weight": Transposed(parts, m, "GPTQ", bits, None, add) for m in parts.named(".qweight")}


def awq(parts: Parts, settings: Quantization) -> dict[str, Packed]:
    """qweight (columns, rows packed in AWQ_ORDER), as version gemm has it."""
    if (settings.version or "gemm").lower() != "gemm":
        raise ConfigError(
            f"config.json: quantization_config: version is {shown(settings.version)}; accepted for awq: gemm"
        )
    bits = width(settings, "awq", 4)
    return {f"{m}.weight": Transposed(parts, m, "AWQ", bits, AWQ_ORDER, 0) for m in parts.named(".qweight")}
