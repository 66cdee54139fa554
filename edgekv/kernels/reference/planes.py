"""Keys as centres and a few bits per element in planes; values in 1 to 4 bits, four tokens side by side.

Scales are float16 bits; n and D are multiples of 64 where bits are packed in words. A code of b bits stands for
(code - (2 ** b - 1) / 2) * scale: levels lie symmetrically about 0 and the top bit is the sign, 1 for x >= 0. x
must be finite.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.kernels.interface import (
    BLOCK,
    CENTRE,
    GAUSS_STEP,
    GROUPS,
    LARGEST_F16,
    LARGEST_FOUR,
    LEAST_WEIGHT,
    place_of,
)
from edgekv.kernels.reference.loops import Loops
from edgekv.kernels.reference.rope import rotate, rotate_back
from edgekv.types import F32, I64, U8, U16

ORDER = sorted(range(BLOCK), key=place_of)  # of a block's tokens, as they are stored


def encode_centres(x: F32, codes: U8, step: U16, t0: int) -> None:
    """Stores means of x (G, n, D) in 4 bits and leaves x - (what was stored) in x; n, t0 are multiples of 64.

    codes (G, cap / 64, CENTRES, D / 2): row 0 has the mean of the block of 64 tokens, rows 1.. those of each
    CENTRE tokens of what that leaves. Two steps hold an offset of all keys, however large, as well as the
    differences. Byte j has element j in its low nibble and j + D / 2 in its high one.
    step (G, cap / 64, CENTRES): the row's largest magnitude / 8.
    """
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


def encode_keys(x: F32, planes: U8, scale: U16, t0: int) -> None:
    """Stores x (G, n, D), n and t0 multiples of 64, in B bits: planes (G, cap / 64, B, GROUPS, D / 8, 16).

    The planes come by successive approximation: the first has the signs of x, the next ones those of what is
    left when sign * step * 2 ** (B - 2 - p) is taken off for plane p; step = GAUSS_STEP[B] * the token's root
    mean square. Byte [p, i, c, j] of a block has channels 8 * c.. from its low bit up, of the token that
    `place_of` puts at (i, j): 16 tokens are looked up at once, and sums come out in order. With
    level = sum of 2 ** (B - 1 - p) * sign, odd whole numbers, scale (G, cap) = |x| ** 2 / (x . level):
    level * scale has the inner product |x| ** 2 with x (RaBitQ for B = 1). A codec whose heads have different
    B keeps their planes one behind the other.
    """
    _, n, d = x.shape
    bits = planes.shape[2]
    square = np.square(x, dtype=np.float64).sum(axis=2)
    step = (np.sqrt(square / d) * GAUSS_STEP[bits]).astype(np.float32)
    left, level = x.copy(), np.zeros(x.shape)
    rows = slice(t0 // BLOCK, (t0 + n) // BLOCK)
    for p in range(bits):
        sign = left >= 0
        planes[:, rows, p] = _in_groups(np.packbits(sign, axis=2, bitorder="little"))
        level += np.where(sign, 1, -1) * 2.0 ** (bits - 1 - p)
        size = (step * np.float32(2.0 ** (bits - 2 - p)))[..., None]
        left -= np.where(sign, size, -size)
    along = (x * level).sum(axis=2)
    scale[:, t0 : t0 + n] = to_half(square / np.where(along == 0, 1, along))


def _in_groups(columns: U8) -> U8:
    """(G, n / 64, GROUPS, D / 8, 16) of the bytes (G, n, D / 8) of tokens."""
    g, n, width = columns.shape
    blocks = columns.reshape(g, n // BLOCK, BLOCK, width)[:, :, ORDER]
    stored: U8 = blocks.reshape(g, n // BLOCK, GROUPS, -1, width).transpose(0, 1, 2, 4, 3)
    return stored


def key_levels(planes: U8, bits: I64) -> F32:
    """(G, cap, D) of planes (sum of bits, blocks, ...) of heads of `bits` (G,): sum of 2 ** (B - 1 - p) * sign."""
    blocks, first = planes.shape[1], np.cumsum(bits) - bits
    heads = (planes[a : a + b].reshape(blocks, b, *planes.shape[2:]) for a, b in zip(first, bits, strict=True))
    return np.stack([_head_levels(head) for head in heads])


def _head_levels(planes: U8) -> F32:
    """(cap, D) of planes (blocks, B, GROUPS, D / 8, 16)."""
    blocks, bits, _, width, _ = planes.shape
    columns = np.empty((blocks, BLOCK, bits, width), np.uint8)
    columns[:, ORDER] = planes.transpose(0, 2, 4, 1, 3).reshape(blocks, BLOCK, bits, width)
    signs = np.unpackbits(columns, axis=-1, bitorder="little").astype(np.float32) * 2 - 1
    weights = 2.0 ** np.arange(bits - 1, -1, -1, dtype=np.float32)
    levels: F32 = np.einsum("btpd,p->btd", signs, weights)
    return levels.reshape(blocks * BLOCK, -1)


def round_queries(q: F32) -> tuple[F32, F32]:
    """q (..., D) in odd halves of a step, and that step (...): four neighbours' sums are whole, at most 63."""
    four = np.abs(q).reshape(*q.shape[:-1], -1, 4)
    largest = (four[..., 0] + four[..., 1] + four[..., 2] + four[..., 3]).max(axis=-1)
    step = largest / np.float32(LARGEST_FOUR)
    whole = np.floor(q / np.where(step == 0, 1, step)[..., None])
    return whole + np.float32(0.5), step


def scores_centred(
    q: F32,
    levels: F32,
    scale: U16,
    key_scale: F32,
    centres: U8,
    centre_step: U16,
    t0: int,
    t1: int,
    s: F32,
    s0: int,
) -> None:
    """s[:, :, s0:] = q . centre + key_scale * scale * (q as `round_queries` has it) . levels, of tokens t0..t1."""
    rounded, step = round_queries(q)
    width = scale[:, t0:t1].view(np.float16).astype(np.float32) * key_scale[:, None]
    products = rounded @ levels[:, t0:t1].transpose(0, 2, 1)
    near = q @ centres_of(centres, centre_step)[:, np.arange(t0, t1) // CENTRE].transpose(0, 2, 1)
    s[:, :, s0 : s0 + t1 - t0] = near + step[..., None] * width[:, None] * products


def to_half(x: npt.NDArray[np.floating]) -> U16:
    """Returns the bits of the nearest finite float16 of x >= 0, shape (*x.shape,)."""
    bits: U16 = np.minimum(x, LARGEST_F16).astype(np.float32).astype(np.float16).view(np.uint16)
    return bits


def centres_of(codes: U8, step: U16) -> F32:
    """(G, cap / CENTRE, D)."""
    levels = np.concatenate([codes & 15, codes >> 4], axis=3).astype(np.float32) - np.float32(7.5)
    means = levels * step.view(np.float16).astype(np.float32)[..., None]  # (G, blocks, CENTRES, D)
    centres: F32 = means[:, :, :1] + means[:, :, 1:]
    return centres.reshape(len(centres), -1, centres.shape[3])


def score_planes(codec: Any, q: F32, t0: int, t1: int, s: F32) -> None:
    """Fills s (G, M, t1 - t0) with scores of queries q (G, M, D) and tokens t0..t1 of a codec."""
    a = codec.arrays
    levels = key_levels(a["planes"], codec.bits)
    stored = levels, a["scale"], codec.key_scale, a["centres"], a["centre_step"]
    rotated = rotate(codec.rotation, q * codec.query_factors[:, None])
    scores_centred(rotated, *stored, t0, t1, s, 0)


PARTS = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,)}  # bits of a code, in groups that divide a byte
TOP_WEIGHT = np.float32(255)


def encode_interleaved(x: F32, codes: U8, scale: U16, t0: int) -> None:
    """Stores x (G, n, D), n and t0 multiples of 64, in codes of b bits at blocks of 64 tokens; any D.

    codes (G, cap / 64, 2 * b, D, 4). For 4, 2 and 1 bits, byte [q, d, i] has element d of the tokens
    t = 4 * q + i, t + 8 * b, t + 16 * b, ... of the block, from its low bits up: four tokens lie side by side,
    as the dot product instructions of 8-bit integers want them. 3 bits are the upper 2 bits (4 rows q)
    followed by the lowest (2 rows).
    The codes are those of the best uniform step for a Gaussian of the token's mean square; scale (G, cap) is
    then |x| ** 2 / (x . levels), so that the stored vector has the inner product |x| ** 2 with x: sums of
    many values are not shrunk.
    """
    g, n, d = x.shape
    bits = codes.shape[2] // 2
    levels, step = gauss_levels(x, bits)
    scale[:, t0 : t0 + n] = to_half(step)
    blocks = levels.reshape(g, n // BLOCK, BLOCK, d)
    row, left = 0, bits
    for part in PARTS[bits]:
        left -= part
        piece = blocks >> left & (1 << part) - 1
        spread = piece.reshape(g, n // BLOCK, 8 // part, 2 * part, 4, d).transpose(0, 1, 2, 3, 5, 4)
        packed = np.zeros(spread.shape[:2] + spread.shape[3:], np.uint8)  # (G, blocks, 2 * part, D, 4)
        for i in range(8 // part):
            packed |= spread[:, :, i] << part * i
        codes[:, t0 // BLOCK : (t0 + n) // BLOCK, row : row + 2 * part] = packed
        row += 2 * part


def values_interleaved(p: F32, s0: int, codes: U8, scale: U16, t0: int, t1: int, out: F32) -> None:
    """out (G, M, D) += p[:, :, s0:] times tokens t0..t1, still rotated; p is rounded in each block."""
    bits = codes.shape[2] // 2
    middle = np.float32((2**bits - 1) / 2)
    for block in range(t0 // BLOCK, -(-t1 // BLOCK)):
        first, last = max(t0, block * BLOCK), min(t1, (block + 1) * BLOCK)
        weights = np.zeros((*out.shape[:2], BLOCK), np.float32)
        inside = slice(first - block * BLOCK, last - block * BLOCK)
        widths = scale[:, None, first:last].view(np.float16).astype(np.float32)
        weights[..., inside] = p[:, :, s0 + first - t0 : s0 + last - t0] * widths
        top = weights.max(axis=2, keepdims=True)
        whole = np.rint(weights * (TOP_WEIGHT / np.maximum(top, np.float32(LEAST_WEIGHT))))
        levels = _levels(codes[:, block], bits).astype(np.float32) - middle  # (G, 64, D)
        out += top / TOP_WEIGHT * (whole @ levels)


def gauss_levels(x: F32, bits: int) -> tuple[U8, np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
    """Codes of x (..., D) in `bits` bits, and the scale that keeps x's length along x."""
    square = np.square(x, dtype=np.float64).sum(axis=-1)
    step = (np.sqrt(square / x.shape[-1]) * GAUSS_STEP[bits]).astype(np.float32)
    half = 2 ** (bits - 1)
    codes = np.clip(np.floor(x / np.where(step == 0, 1, step)[..., None]) + half, 0, 2 * half - 1)
    along = (x.astype(np.float64) * (codes - (half - 0.5))).sum(axis=-1)
    return codes.astype(np.uint8), square / np.where(along == 0, 1, along)


def _levels(codes: U8, bits: int) -> U8:
    """(G, 64, D) of a block (G, 2 * bits, D, 4)."""
    g, _, d, _ = codes.shape
    levels = np.zeros((g, BLOCK, d), np.uint8)
    row = 0
    for part in PARTS[bits]:
        rows = codes[:, row : row + 2 * part]
        pieces = [rows >> part * i & (1 << part) - 1 for i in range(8 // part)]  # each (G, 2 * part, D, 4)
        stacked = np.stack(pieces, axis=1).transpose(0, 1, 2, 4, 3)
        levels = levels << part | stacked.reshape(g, BLOCK, d)
        row += 2 * part
    return levels


def _sums(codec: Any, p: F32, t0: int, t1: int, out: F32) -> None:
    rotated = np.zeros_like(out)
    codes, scale = codec.arrays["codes"], codec.arrays["scale"]
    for g, (first, bits) in enumerate(codec.heads):
        head = codes[first : first + bits].reshape(1, codes.shape[1], -1, *codes.shape[3:])
        values_interleaved(p[g : g + 1], 0, head, scale[g : g + 1], t0, t1, rotated[g : g + 1])
    rotate_back(codec.rotation, rotated, out)


LOOPS = {"centred_planes": Loops(scores=score_planes), "interleaved": Loops(sums=_sums)}
