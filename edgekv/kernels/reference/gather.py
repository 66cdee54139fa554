"""Keys and values as bit planes per token, of which only those that matter are read."""

import numpy as np
import numpy.typing as npt

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.contract.planes import FULL_VALUES, KEY_STEP, LARGEST_CORRECTION, PAIR_STEP
from edgekv.kernels.contract.segment import Segment
from edgekv.kernels.reference.bits import pack_sign_rows
from edgekv.kernels.reference.ints import decode_symmetric
from edgekv.kernels.reference.loops import Loops
from edgekv.kernels.reference.planes import key_levels, round_queries
from edgekv.kernels.reference.rotate import rotate, rotate_back
from edgekv.types import F32, I64, U16, U64


def encode_planes(x: F32, step: F32, planes: U64, t0: int) -> None:
    for j in range(planes.shape[2]):
        planes[:, t0 : t0 + x.shape[1], j] = pack_sign_rows(x)
        size = (step / np.float32(2**j))[..., None]
        x -= np.where(x >= 0, size, -size)


def attend_planes(
    p: F32,
    s0: int,
    t0: int,
    t1: int,
    q: F32,
    rounded: F32,
    key_scale: F32,
    signs: F32,
    scale: U16,
    fine: U64,
    top: U64,
    low: U64,
    value_scale: U16,
    threshold: float,
    n: int,
    out: F32,
    tail: F32,
    change: F32,
    counts: I64,
) -> None:
    """The second stage of attention: tokens t0..t1, of which a scan gave p (G, M, columns from s0 on).

    A token with p >= threshold for a query head of its group (M = R * n rows) has its scores corrected by
    ``fine``, the key's lower planes (G, cap, 3, W): p grows by exp(correction), bounded by LARGEST_CORRECTION.
    q (G, M, D) are rotated queries, ``rounded`` what they were scored as, key_scale (G,) and scale (G, cap)
    factors of the estimate, signs (G, cap, D) the first plane as +-1. If the largest new p is FULL_VALUES *
    threshold or more, all planes of the value are read: top, low (G, cap, 2, W), value_scale (G, cap); from
    threshold on, two.

    out (G, M, D) += the values read; tail (G, M, blocks) = what remains of p in each block of 64; change (G, M) =
    the change of p's sum; counts (G, n, 2) = tokens corrected, and read in full.
    """
    tail[...] = 0
    column = np.arange(t0, t1)
    for g in range(q.shape[0]):
        for j in range(n):
            rows = slice(j, None, n)
            old = p[g, rows, s0 : s0 + t1 - t0]  # (R, T)
            chosen = np.flatnonzero((old >= np.float32(threshold)).any(axis=0))
            t = t0 + chosen
            width = scale[g, t].view(np.float16).astype(np.float32)
            code = 4 * signs[g, t] + _levels(fine[g, t])
            coarse = key_scale[g] * (rounded[g, rows] @ signs[g, t].T)
            correction = width * (np.float32(KEY_STEP) * (q[g, rows] @ code.T) - coarse)  # (R, K)
            new = old.copy()
            new[:, chosen] *= np.exp(np.clip(correction, -LARGEST_CORRECTION, LARGEST_CORRECTION))
            change[g, rows] = (new - old).sum(axis=1)
            largest = new[:, chosen].max(axis=0, initial=0)
            all_planes = largest >= np.float32(FULL_VALUES * threshold)
            pair = ~all_planes & (largest >= np.float32(threshold))
            size = value_scale[g, t].view(np.float16).astype(np.float32)[:, None]
            values = np.where(
                all_planes[:, None],
                _levels(np.concatenate([top[g, t], low[g, t]], axis=1)) * size,
                _levels(top[g, t]) * size * np.float32(PAIR_STEP),
            )
            read = chosen[all_planes | pair]
            out[g, rows] += new[:, read] @ values[all_planes | pair]
            new[:, read] = 0
            for r, row in enumerate(new):
                np.add.at(tail[g, r * n + j], column // BLOCK - t0 // BLOCK, row)
            counts[g, j] = len(chosen), all_planes.sum()


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


def _second_stage(segment: Segment, q: F32, p: F32, n: int, out: F32, change: F32) -> None:
    """Tokens of enough probability by the scan, again with all their bits; the others as their block's mean."""
    keys, values, t0, t1, *_ = segment
    a, k = values.arrays, keys.arrays
    rotated = rotate(keys.rotation, q)
    rounded, step = round_queries(rotated)
    n_kv_heads, rows, _ = rotated.shape
    b0, b1 = t0 // BLOCK, -(-t1 // BLOCK)
    inner, moved = np.zeros_like(rotated), np.empty((n_kv_heads, rows), np.float32)
    tail, counts = np.empty((n_kv_heads, rows, b1 - b0), np.float32), np.empty((n_kv_heads, n, 2), np.int64)
    signs = key_levels(k["planes"], keys.bits)
    stored = signs, k["scale"], k["fine"], a["top"], a["low"], a["scale"]
    attend_planes(
        *(p, 0, t0, t1, rotated, rounded * step[..., None], keys.key_scale, *stored),
        *(values.threshold, n, inner, tail, moved, counts),
    )
    inner += tail @ decode_symmetric(a["means"], a["mean_scale"], b0, b1, inner.shape[2])
    values.counts = counts.mean(axis=(0, 1))
    change += moved
    rotate_back(keys.rotation, inner, out)


LOOPS = {"plane_values": Loops(second_stage=_second_stage)}
