"""GGUF's quantized blocks: those that a weight format holds too are taken over as they are.

Source of the layouts: llama.cpp's ggml/src/ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgekv.errors import CheckpointError
from edgekv.types import F32, I8, U8

FLOATS = {"F32": "F32", "F16": "F16", "BF16": "BF16", "F64": "F64"}  # GGUF's type -> safetensors'


class Blocks(NamedTuple):
    """Of rows: weights are whole numbers (r, blocks, 32) times scales (r, blocks), plus offsets (r, blocks).

    offsets: None where all are 0.
    """

    codes: I8
    scales: F32
    offsets: F32 | None = None


def _half(blocks: U8, at: int) -> F32:
    """The half float at a byte of each block."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)


def _nibbles(packed: U8) -> I8:
    """The low halves of all bytes, then the high ones, less 8."""
    codes: I8 = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.int8)
    codes -= np.int8(8)
    return codes


def _q4_0(blocks: U8) -> Blocks:
    """A half float, then 16 bytes: elements 0..15 in the low nibbles, 16..31 in the high ones, less 8."""
    return Blocks(_nibbles(blocks[..., 2:]), _half(blocks, 0))


def _q4_1(blocks: U8) -> Blocks:
    """Scale and least number, then nibbles as in Q4_0."""
    scales = _half(blocks, 0)
    return Blocks(_nibbles(blocks[..., 4:]), scales, _half(blocks, 2) + 8 * scales)


def _q8_0(blocks: U8) -> Blocks:
    return Blocks(blocks[..., 2:].view(np.int8), _half(blocks, 0))


def _q4_k(blocks: U8) -> Blocks:
    """256 numbers: two half floats, 8 scales and 8 least numbers of 6 bits in 12 bytes, then 4 times 64 nibbles.

    A number is (first half float) * scale * nibble - (second) * least.
    """
    packed = blocks[..., 4:16]
    first, second, rest = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([first & 63, (rest & 15) | (first >> 6 << 4)], axis=-1)
    least = np.concatenate([second & 63, (rest >> 4) | (second >> 6 << 4)], axis=-1)
    codes = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32))
    steps = _half(blocks, 0)[..., None] * scales
    offsets = 8 * steps - _half(blocks, 2)[..., None] * least
    rows = len(blocks)
    return Blocks(codes.reshape(rows, -1, 32), steps.reshape(rows, -1), offsets.reshape(rows, -1))


LAYOUTS: dict[str, tuple[int, Callable[[U8], Blocks], str]] = {
    "Q4_0": (18, _q4_0, "int4-32"),
    "Q8_0": (34, _q8_0, "int8-32"),
    "Q4_1": (20, _q4_1, "int4-32-offsets"),
    "Q4_K": (144, _q4_k, "int4-32-offsets"),
}
"""Types that a weight format holds without loss: bytes of a block, what it is made of, and that format."""

NEAREST = dict.fromkeys(("Q5_0", "Q5_1", "Q5_K", "Q6_K"), "int8-32")
"""Types of more than 4 bits are quantized again to 8 bits; all others to 4."""


def blocks_of(raw: U8, kind: str) -> Blocks:
    """Of rows (r, bytes) of a type in LAYOUTS."""
    size, unpack, _ = LAYOUTS[kind]
    with np.errstate(invalid="ignore"):  # infinite scales of a damaged file
        return unpack(np.ascontiguousarray(raw).reshape(len(raw), -1, size))


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
