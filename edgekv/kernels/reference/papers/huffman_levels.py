"""Error-bounded levels: codes of a fixed relative step within each channel of a block or each token."""

import numpy as np

from edgekv.kernels.contract.attention import LARGEST_F16
from edgekv.kernels.reference.rounding import round_up_to_f16
from edgekv.types import F32, U8, U16


def quantize_channels(
    x: F32, relative_step: float, levels: int, block: int, codes: U8, low: U16, step: U16, b0: int
) -> None:
    blocks = slice(b0, b0 + x.shape[1] // block)
    units = x.reshape(len(x), -1, block, x.shape[2])  # (G, B, block, D)
    low[:, blocks], step[:, blocks] = _scale(units.min(axis=2), units.max(axis=2), relative_step)
    scale = low[:, blocks, None], step[:, blocks, None]
    codes[...] = _levels(units, *scale, levels).reshape(x.shape)


def quantize_tokens(x: F32, relative_step: float, levels: int, codes: U8, low: U16, step: U16, t0: int) -> None:
    tokens = slice(t0, t0 + x.shape[1])
    low[:, tokens], step[:, tokens] = _scale(x.min(axis=2), x.max(axis=2), relative_step)
    codes[...] = _levels(x, low[:, tokens, None], step[:, tokens, None], levels)


def _scale(least: F32, largest: F32, relative_step: float) -> tuple[U16, U16]:
    low = np.clip(least, -LARGEST_F16, LARGEST_F16).astype(np.float16) + np.float16(0)  # no -0
    span = np.maximum(largest - low.astype(np.float32), 0)
    return low.view(np.uint16), round_up_to_f16(span * np.float32(relative_step))


def _levels(x: F32, low: U16, step: U16, levels: int) -> U8:
    size = _widen(step)
    size[size == 0] = 1
    codes: U8 = np.clip(np.rint((x - _widen(low)) / size), 0, levels - 1).astype(np.uint8)
    return codes


def _widen(bits: U16) -> F32:
    return bits.view(np.float16).astype(np.float32)
