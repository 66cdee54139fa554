"""Keys as a centre per 16 tokens and one sign per element, scored with queries in bit planes."""

import numpy as np
import numpy.typing as npt

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.contract.planes import CENTRE
from edgekv.kernels.reference.signs import pack_sign_rows, pack_signs
from edgekv.types import F32, U8, U16, U64

LARGEST_F16 = 65504.0


def encode_centres(x: F32, codes: U8, step: U16, t0: int) -> None:
    g, n, d = x.shape
    blocks = slice(t0 // BLOCK, (t0 + n) // BLOCK)
    _encode_means(x.reshape(g, n // BLOCK, 1, BLOCK, d), codes[:, blocks, :1], step[:, blocks, :1])
    _encode_means(x.reshape(g, n // BLOCK, -1, CENTRE, d), codes[:, blocks, 1:], step[:, blocks, 1:])


def _encode_means(x: F32, codes: U8, step: U16) -> None:
    """codes (..., D / 2) and step (...) of the means of x (..., n, D), which are subtracted."""
    n, d = x.shape[-2:]
    mean = x[..., 0, :].copy()
    for i in range(1, n):
        mean += x[..., i, :]
    mean *= np.float32(1 / n)
    step[...] = to_half(np.abs(mean).max(axis=-1) / np.float32(8))
    width = step.view(np.float16).astype(np.float32)[..., None]
    levels = np.clip(np.floor(mean / np.where(width == 0, 1, width)) + 8, 0, 15).astype(np.float32)
    packed = levels.astype(np.uint8)
    codes[...] = packed[..., : d // 2] | packed[..., d // 2 :] << 4
    x -= ((levels - np.float32(7.5)) * width)[..., None, :]


def encode_signs(x: F32, signs: U64, scale: U16, t0: int) -> None:
    square = np.square(x, dtype=np.float64).sum(axis=2)
    magnitude = np.abs(x).sum(axis=2, dtype=np.float64)
    scale[:, t0 : t0 + x.shape[1]] = to_half(square / np.where(magnitude == 0, 1, magnitude))
    pack_signs(x, signs, t0)


def pack_queries(q: F32, planes: U64, step: F32, rounded: F32) -> None:
    n_planes = planes.shape[2]
    half = 2.0 ** (n_planes - 1)
    step[...] = np.abs(q).max(axis=2) / np.float32(half)
    width = np.where(step == 0, 1, step)[..., None]
    codes = np.clip(np.floor(q / width) + half, 0, 2 * half - 1).astype(np.int64)
    rounded[...] = (codes - half + 0.5) * step[..., None]
    for plane in range(n_planes):
        bits = codes >> (n_planes - 1 - plane) & 1
        planes[:, :, plane] = pack_sign_rows(bits.astype(np.float32) - 1)


def scores_centred(
    q: F32,
    planes: U64,
    step: F32,
    signs: U64,
    scale: U16,
    centres: U8,
    centre_step: U16,
    t0: int,
    t1: int,
    s: F32,
    s0: int,
) -> None:
    n_planes, d = planes.shape[2], q.shape[2]
    tokens = np.arange(t0, t1)
    words = signs[:, tokens // BLOCK, :, tokens % BLOCK].transpose(1, 0, 2)  # (G, T, W)
    widths = scale[:, t0:t1].view(np.float16).astype(np.float32)
    centre_scores = q @ _centres(centres, centre_step).transpose(0, 2, 1)
    for m in range(q.shape[1]):
        differing = np.zeros(words.shape[:2], np.int64)
        for plane in range(n_planes):
            differing = 2 * differing + _popcount(words ^ planes[:, m, plane, None])
        product = ((2**n_planes - 1) * d - 2 * differing).astype(np.float32) / 2
        columns = centre_scores[:, m, tokens // CENTRE] + step[:, m, None] * widths * product
        s[:, m, s0 : s0 + t1 - t0] = columns


def to_half(x: npt.NDArray[np.floating]) -> U16:
    """Bits of the nearest finite float16 of x >= 0."""
    bits: U16 = np.minimum(x, LARGEST_F16).astype(np.float32).astype(np.float16).view(np.uint16)
    return bits


def _centres(codes: U8, step: U16) -> F32:
    """(G, cap / CENTRE, D)."""
    levels = np.concatenate([codes & 15, codes >> 4], axis=3).astype(np.float32) - np.float32(7.5)
    means = levels * step.view(np.float16).astype(np.float32)[..., None]  # (G, blocks, CENTRES, D)
    centres: F32 = means[:, :, :1] + means[:, :, 1:]
    return centres.reshape(len(centres), -1, centres.shape[3])


def _popcount(words: U64) -> npt.NDArray[np.int64]:
    """Bits of each row of words (G, T, W)."""
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1)
    counts: npt.NDArray[np.int64] = bits.sum(axis=-1, dtype=np.int64)
    return counts
