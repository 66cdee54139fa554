"""Keys and values as bit planes per token, of which only those that matter are read."""

from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.contract.planes import (
    CENTRE,
    FULL_VALUES,
    KEY_STEP,
    LARGEST_CORRECTION,
    LEAST_VARIANCE,
    PAIR_STEP,
    REACH,
    SIGN_NOISE,
    sampled_blocks,
)
from edgekv.kernels.contract.segment import Segment
from edgekv.kernels.reference.bits import pack_sign_rows
from edgekv.kernels.reference.ints import decode_symmetric
from edgekv.kernels.reference.loops import Loops
from edgekv.kernels.reference.planes import centres_of, key_levels, round_queries, score_planes
from edgekv.kernels.reference.rotate import rotate, rotate_back
from edgekv.types import F32, I64, U64


def encode_planes(x: F32, step: F32, planes: U64, t0: int) -> None:
    for j in range(planes.shape[2]):
        planes[:, t0 : t0 + x.shape[1], j] = pack_sign_rows(x)
        size = (step / np.float32(2**j))[..., None]
        x -= np.where(x >= 0, size, -size)


def attend_planes(
    keys: Any, values: Any, first: int, stop: int, q: F32, rounded: F32, p: F32, n: int, out: F32
) -> tuple[F32, F32, I64]:
    """The second stage of attention: tokens first..stop, of which a scan gave p (G, M, stop - first).

    keys of kind plane_keys, values of kind plane_values. A token with p >= values.threshold for a query head of
    its group (M = R * n rows) has its scores corrected by ``fine``, the key's lower planes: p grows by
    exp(correction), bounded by LARGEST_CORRECTION. q (G, M, D) are rotated queries, ``rounded`` what they were
    scored as. If the largest new p is FULL_VALUES * threshold or more, all planes of the value are read, ``top``
    and ``low``; from threshold on, two.

    out (G, M, D) += the values read. Returns tail (G, M, blocks), what remains of p in each block of 64; change
    (G, M), that of p's sum; counts (G, n, 2), tokens corrected, and read in full.
    """
    k, v, column, threshold = keys.arrays, values.arrays, np.arange(first, stop), values.threshold
    signs = key_levels(k["planes"], keys.bits)
    tail = np.zeros((*p.shape[:2], -(-stop // BLOCK) - first // BLOCK), np.float32)
    change, counts = np.empty(p.shape[:2], np.float32), np.empty((len(p), n, 2), np.int64)
    for g, j in np.ndindex(len(p), n):
        rows = slice(j, None, n)
        old = p[g, rows]  # (R, T)
        chosen = np.flatnonzero((old >= np.float32(threshold)).any(axis=0))
        t = first + chosen
        width = k["scale"][g, t].view(np.float16).astype(np.float32)
        code = 4 * signs[g, t] + _levels(k["fine"][g, t])
        coarse = keys.key_scale[g] * (rounded[g, rows] @ signs[g, t].T)
        correction = width * (np.float32(KEY_STEP) * (q[g, rows] @ code.T) - coarse)  # (R, K)
        new = old.copy()
        new[:, chosen] *= np.exp(np.clip(correction, -LARGEST_CORRECTION, LARGEST_CORRECTION))
        change[g, rows] = (new - old).sum(axis=1)
        largest = new[:, chosen].max(axis=0, initial=0)
        all_planes = largest >= np.float32(FULL_VALUES * threshold)
        pair = ~all_planes & (largest >= np.float32(threshold))
        size = v["scale"][g, t].view(np.float16).astype(np.float32)[:, None]
        read_values = np.where(
            all_planes[:, None],
            _levels(np.concatenate([v["top"][g, t], v["low"][g, t]], axis=1)) * size,
            _levels(v["top"][g, t]) * size * np.float32(PAIR_STEP),
        )
        read = chosen[all_planes | pair]
        out[g, rows] += new[:, read] @ read_values[all_planes | pair]
        new[:, read] = 0
        for r, row in enumerate(new):
            np.add.at(tail[g, r * n + j], column // BLOCK - first // BLOCK, row)
        counts[g, j] = len(chosen), all_planes.sum()
    return tail, change, counts


def _signs(words: U64) -> F32:
    """(..., D) of +-1 of words (..., W)."""
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    return bits.astype(np.float32) * 2 - 1


def _levels(planes: npt.NDArray[np.uint64]) -> F32:
    """code - middle (K, D) of planes (K, B, W)."""
    n_planes = planes.shape[-2]
    weights = 2.0 ** np.arange(n_planes - 2, -2, -1)  # the sign plane counts half of 2 ** n_planes
    levels: F32 = np.einsum("...bd,b->...d", _signs(planes), weights.astype(np.float32))
    return levels


def deviations(keys: Any, q: F32, first: int, stop: int) -> tuple[F32, F32]:
    """Scores (G, M, cap / CENTRE) with the tokens' centres, and how far scores of tokens lie around them.

    That is |q| times ``deviation`` where q looks in no direction more than keys differ in; how much more or less
    the scan of sampled blocks says.
    """
    a, rotated = keys.arrays, rotate(keys.rotation, q * keys.query_factors[:, None])
    near = rotated @ centres_of(a["centres"], a["centre_step"]).transpose(0, 2, 1)
    length = np.sqrt((rotated * rotated).sum(axis=2))
    width: F32 = length[:, :, None] * a["deviation"].view(np.float16).astype(np.float32)[:, None]
    square, expected = np.zeros(q.shape[:2]), np.zeros(q.shape[:2])
    for block in sampled_blocks(first, stop):
        t0, t1 = block * BLOCK, (block + 1) * BLOCK
        runs, scanned = np.arange(t0, t1) // CENTRE, np.empty((*q.shape[:2], BLOCK), np.float32)
        score_planes(keys, q, t0, t1, scanned)
        square += np.square(scanned - near[:, :, runs]).sum(axis=2)
        expected += np.square(width[:, :, runs]).sum(axis=2)
    measured = np.divide(square, expected, out=np.ones_like(square), where=expected > 0)
    variance = np.maximum(measured / np.square(keys.key_scale[:, None]) - SIGN_NOISE, LEAST_VARIANCE)
    factor = np.where(expected > 0, np.sqrt(variance), 1).astype(np.float32)
    return near, width * factor[:, :, None]


def _estimate(keys: Any, q: F32, t0: int, t1: int, s: F32) -> None:
    """The centre's score, and what deviations add to the mean of exp: half a variance, at most REACH of them."""
    near, deviation = deviations(keys, q, t0, t1)
    added = np.minimum(deviation * deviation / 2, np.float32(REACH) * deviation)
    s[...] = (near + added)[:, :, np.arange(t0, t1) // CENTRE]


def _rescan(segment: Segment, q: F32, n: int, total: F32, s: F32) -> None:
    """A block is scanned for a query token where, for a head of its group, a token can have the threshold."""
    keys, values, first, stop, *_ = segment
    scanned = np.empty_like(s)
    score_planes(keys, q, first, stop, scanned)
    _, deviation = deviations(keys, q, first, stop)
    column = np.arange(first, stop)
    square = deviation * deviation
    above = np.maximum(REACH * deviation, square) - np.minimum(square / 2, REACH * deviation)
    above = above.astype(np.float32)[:, :, column // CENTRE]
    seen = s > -np.inf
    reaches = seen & (s + above >= total[..., None] + np.log(np.float32(values.threshold)))
    borders = np.flatnonzero(np.diff(column // BLOCK, prepend=-1))  # where blocks begin
    in_blocks = np.logical_or.reduceat(reaches, borders, axis=2)
    of_tokens = in_blocks.reshape(len(s), -1, n, len(borders)).any(axis=1)  # (G, n, blocks)
    chosen = np.repeat(of_tokens, np.diff([*borders, len(column)]), axis=2)
    chosen = np.tile(chosen, (1, s.shape[1] // n, 1))
    s[...] = np.where(chosen & seen, scanned, s)
    samples = np.isin(column[borders] // BLOCK, sampled_blocks(first, stop))
    values.counts = np.append(values.counts[:2], (of_tokens | samples).sum(axis=2).mean())


def _second_stage(segment: Segment, q: F32, p: F32, n: int, out: F32, change: F32) -> None:
    """Tokens of enough probability by the scan, again with all their bits; the others as their block's mean."""
    keys, values, first, stop, *_ = segment
    rotated = rotate(keys.rotation, q * keys.query_factors[:, None])
    rounded, step = round_queries(rotated)
    inner = np.zeros_like(rotated)
    tail, moved, counts = attend_planes(keys, values, first, stop, rotated, rounded * step[..., None], p, n, inner)
    blocks = first // BLOCK, -(-stop // BLOCK)
    inner += tail @ decode_symmetric(values.arrays["means"], values.arrays["mean_scale"], *blocks, inner.shape[2])
    values.counts = np.append(counts.mean(axis=(0, 1)), values.counts[2])
    change += moved
    rotate_back(keys.rotation, inner, out)


LOOPS = {
    "plane_keys": Loops(scores=score_planes, estimate=_estimate),
    "plane_values": Loops(rescan=_rescan, second_stage=_second_stage),
}
