"""GGUF's quantized blocks of 32: those that MatMulNBits has too are taken over as they are.

Source of the layouts: llama.cpp's ggml/src/ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.errors import CheckpointError
from edgekv.types import F32, I8, U8

FLOATS = {"F32": "F32", "F16": "F16", "BF16": "BF16", "F64": "F64"}  # GGUF's type -> safetensors'


def _q4_0(blocks: U8) -> I8:
    """A half float, then 16 bytes: elements 0..15 in the low nibbles, 16..31 in the high ones, less 8."""
    packed = blocks[..., 2:]
    codes: I8 = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.int8)
    codes -= np.int8(8)
    return codes


def _q8_0(blocks: U8) -> I8:
    codes: I8 = blocks[..., 2:].view(np.int8)
    return codes


SYMMETRIC: dict[str, tuple[int, Callable[[U8], I8]]] = {"Q4_0": (18, _q4_0), "Q8_0": (34, _q8_0)}  # bytes, codes
"""Types whose blocks are a scale times whole numbers around 0."""

FORMATS = {"Q4_0": "int4-32", "Q8_0": "int8-32"}
"""Weight formats with the same blocks."""

NEAREST = dict.fromkeys(("Q4_1", "Q5_0", "Q5_1", "Q5_K", "Q6_K"), "int8-32")
"""Types of more than 4 bits, or of uneven levels, are quantized again to 8 bits; all others to 4."""


def symmetric_blocks(raw: U8, kind: str) -> tuple[I8, F32]:
    """Of rows (r, bytes): whole numbers (r, blocks, 32) and scales (r, blocks), whose products are the weights."""
    size, codes = SYMMETRIC[kind]
    blocks = np.ascontiguousarray(raw).reshape(len(raw), -1, size)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].astype(np.float32)
    return codes(blocks), scales


def dequantize(raw: U8, kind: str) -> npt.NDArray[Any]:
    """(r, columns) float32 of rows (r, bytes) of any quantized type, by the gguf library."""
    from edgekv.checkpoint.gguf_import import library

    gguf = library("this file's weights")
    try:
        values: F32 = gguf.quants.dequantize(np.ascontiguousarray(raw), gguf.GGMLQuantizationType[kind])
    except NotImplementedError:
        raise CheckpointError(
            f"weights of type {kind} can't be read by the gguf package; give the model in Q4_0, Q8_0, Q4_K or F16"
        ) from None
    return values
