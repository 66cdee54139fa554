"""MXFP4 experts as GPT-OSS publishes them: e2m1 numbers of 4 bits, a power of two for every 32."""

from __future__ import annotations

import numpy as np

from edgekv.checkpoint.packed.parts import Parts, Quantization
from edgekv.checkpoint.packed.tensors import Packed
from edgekv.checkpoint.stacked import PARTS
from edgekv.types import F32, I8

BLOCK = 32
E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the numbers that the 16 e2m1 codes stand for, which are then whole."""
BIAS, MOST = 128, 254  # of the exponents, for twice the numbers; and the largest that is a number


class MxFp4(Packed):
    """One projection of one expert: rows first, first + step, ... of its part of a tensor (experts, rows, ...)."""

    kind = "MXFP4"
    exact = "fp4-32"

    def __init__(self, parts: Parts, base: str, expert: int, first: int, step: int) -> None:
        names = f"{base}_blocks", f"{base}_scales"
        codes, exponents = (parts.tensors.array(name) for name in names)
        self._codes, self._exponents = codes[expert, first::step], exponents[expert, first::step]
        self.shared = len(codes) * step
        super().__init__((len(self._codes), BLOCK * codes.shape[2]), names)

    def values(self, lo: int, hi: int) -> F32:
        whole, scales = self.blocks(lo, hi)
        values: F32 = (whole * scales[..., None]).reshape(hi - lo, -1)
        return values

    def blocks(self, lo: int, hi: int) -> tuple[I8, F32]:
        """What `TensorFile.blocks` gives: twice the numbers, half their scales."""
        packed = self._codes[lo:hi]
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:2], BLOCK)
        exponents = np.minimum(self._exponents[lo:hi], MOST).astype(np.int32) - BIAS
        scales: F32 = np.ldexp(np.float32(1), exponents).astype(np.float32)
        return E2M1_DOUBLED[codes], scales


def mxfp4(parts: Parts, settings: Quantization) -> dict[str, Packed]:
    """``experts.gate_up_proj_blocks`` (experts, rows, blocks, 16), and ``_scales``; so down's."""
    found: dict[str, Packed] = {}
    for projection, pieces in PARTS.items():
        for base in parts.named(f".{projection}_blocks"):
            _check(parts, f"{base}.{projection}")
            for e in range(parts.tensors.info(f"{base}.{projection}_blocks").shape[0]):
                for part, first, step in pieces:
                    matrix = MxFp4(parts, f"{base}.{projection}", e, first, step)
                    found[f"{base}.{e}.{part}.weight"] = matrix
    return found


def _check(parts: Parts, base: str) -> None:
    """CheckpointError for tensors of other types or shapes."""
    codes, exponents = (parts.tensors.array(f"{base}{end}") for end in ("_blocks", "_scales"))
    if codes.dtype != np.uint8 or codes.ndim != 4 or codes.shape[3] != BLOCK // 2 or not codes.size:
        raise parts.wrong(f"{base}_blocks", "bytes (experts, rows, blocks, 16)")
    if exponents.dtype != np.uint8 or exponents.shape != codes.shape[:3]:
        raise parts.wrong(f"{base}_scales", f"bytes {codes.shape[:3]}")
