"""Attention over segments, written for reading: all scores, one softmax, then each segment's sum of values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.contract.segment import Segment, Visible, refuse_weights_of_chosen
from edgekv.kernels.reference.bits import pack_sign_rows
from edgekv.kernels.reference.gather import attend_planes
from edgekv.kernels.reference.interleaved_values import values_interleaved
from edgekv.kernels.reference.ints import decode_symmetric, symmetric
from edgekv.kernels.reference.papers.fier import sign_index
from edgekv.kernels.reference.papers.huffman import huffman_keys, huffman_values
from edgekv.kernels.reference.papers.int4 import values_int4
from edgekv.kernels.reference.papers.kivi import kivi_keys, kivi_values
from edgekv.kernels.reference.papers.mikv import token_keys
from edgekv.kernels.reference.papers.retrieval import scores_f16_at, values_f16_at
from edgekv.kernels.reference.papers.signs import scores_signs
from edgekv.kernels.reference.papers.visual import levels
from edgekv.kernels.reference.planes import key_levels, round_queries, scores_centred
from edgekv.kernels.reference.rotate import rotate, rotate_back
from edgekv.kernels.reference.rows import scores_f16
from edgekv.kernels.reference.softmax import softmax
from edgekv.types import F32


def attend(
    queries: F32, segments: Sequence[Segment], visible: Visible, out: F32, weights: F32 | None = None
) -> None:
    n_heads, n, head_dim = queries.shape
    refuse_weights_of_chosen(segments, weights)
    n_kv_heads = segments[0].keys.n_kv_heads
    q = queries.reshape(n_kv_heads, n_heads // n_kv_heads * n, head_dim)
    columns = [segment_scores(segment, q, n, visible) for segment in segments]
    p = np.concatenate(columns, axis=2)
    ends = np.cumsum([0, *(s.shape[2] for s in columns)])
    softmax(p, np.zeros(p.shape[1], np.int64), np.full(p.shape[1], p.shape[2]))
    result, change = np.zeros_like(q), np.zeros(q.shape[:2], np.float32)
    for i, segment in enumerate(segments):
        add_values(segment, q, p[:, :, ends[i] : ends[i + 1]], n, result, change)
    out[...] = (result / (1 + change[..., None])).reshape(out.shape)
    if weights is not None:
        weights[...] = p


def segment_scores(segment: Segment, q: F32, n: int, visible: Visible) -> F32:
    """(G, M, tokens of the segment), -inf where a query does not see the token."""
    keys, _, first, stop, position, positions, chosen = segment
    n_kv_heads, rows, _ = q.shape
    if chosen is not None:
        tokens, counts = chosen
        s = np.full((n_kv_heads, rows, tokens.shape[2]), -np.inf, np.float32)
        scores_f16_at(q, keys.arrays["half"], tokens, counts, s)
        return s
    s = np.empty((n_kv_heads, rows, stop - first), np.float32)
    scores(keys, q, first, stop, s)
    at = np.arange(position, position + stop - first) if positions is None else positions[:, None, first:stop]
    lo, hi = (np.tile(x, rows // n)[:, None] for x in visible)
    return np.where((at >= lo) & (at < hi), s, np.float32(-np.inf))


def add_values(segment: Segment, q: F32, p: F32, n: int, out: F32, change: F32) -> None:
    """out (G, M, D) += p (G, M, tokens) times the segment's values; change += what a second stage adds to p."""
    _, values, first, stop, _, _, chosen = segment
    if chosen is not None:
        values_f16_at(p, values.arrays["half"], *chosen, out)
    elif values.kind == "plane_values":
        _second_stage(segment, q, p, n, out, change)
    else:
        sums(values, p, first, stop, out)


def scores(codec: Any, queries: F32, t0: int, t1: int, s: F32) -> None:
    KEYS[codec.kind](codec, queries, t0, t1, s)


def sums(codec: Any, p: F32, t0: int, t1: int, out: F32) -> None:
    VALUES[codec.kind](codec, p, t0, t1, out)


def append(keys: Any, values: Any, k: F32, v: F32, t0: int) -> None:
    keys.encode(k, t0)
    values.encode(v, t0)


def _f16(codec: Any, t0: int, t1: int) -> F32:
    numbers: F32 = codec.arrays["half"][:, t0:t1].view(np.float16).astype(np.float32)
    return numbers


def _f32(codec: Any, t0: int, t1: int) -> F32:
    numbers: F32 = codec.arrays["single"][:, t0:t1]
    return numbers


def _by_itself(codec: Any, t0: int, t1: int) -> F32:
    numbers: F32 = codec.decode(t0, t1)
    return numbers


def _decoded_scores(codec: Any, q: F32, t0: int, t1: int, s: F32) -> None:
    s[...] = q @ DECODED[codec.kind](codec, t0, t1).transpose(0, 2, 1)


def _decoded_sums(codec: Any, p: F32, t0: int, t1: int, out: F32) -> None:
    out += p @ DECODED[codec.kind](codec, t0, t1)


def _sign_scores(codec: Any, q: F32, t0: int, t1: int, s: F32) -> None:
    """H1B-KV, equations 2, 3 and 5: query m = r * n + j has the temperature of head r."""
    scale = np.repeat(1 / (codec.bits * codec.tau), q.shape[1] // codec.tau.shape[1], axis=1)
    scores_signs(pack_sign_rows(q @ codec.projection.T), codec.arrays["signs"], t0, t1, scale, s, 0)


def _centred_scores(codec: Any, q: F32, t0: int, t1: int, s: F32) -> None:
    a = codec.arrays
    levels = key_levels(a["planes"], codec.bits)
    stored = levels, a["scale"], codec.lam, a["centres"], a["centre_step"]
    scores_centred(rotate(codec.rotation, q), *stored, t0, t1, s, 0)


def _page_scores(codec: Any, q: F32, t0: int, t1: int, s: F32) -> None:
    """Per page the sum over channels of the larger product: the positive part of q meets the largest key."""
    parts = np.concatenate([np.maximum(q, 0), np.minimum(q, 0)], axis=2)
    scores_f16(parts, codec.arrays["bounds"], t0, t1, s, 0)


def _int4_sums(codec: Any, p: F32, t0: int, t1: int, out: F32) -> None:
    a = codec.arrays
    values_int4(p, 0, a["codes"], a["delta"], a["zero"], t0, t1, out)


def _interleaved_sums(codec: Any, p: F32, t0: int, t1: int, out: F32) -> None:
    rotated = np.zeros_like(out)
    values_interleaved(p, 0, codec.arrays["codes"], codec.arrays["scale"], t0, t1, rotated)
    rotate_back(codec.rotation, rotated, out)


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
        *(p, 0, t0, t1, rotated, rounded * step[..., None], keys.lam, *stored),
        *(values.threshold, n, inner, tail, moved, counts),
    )
    inner += tail @ decode_symmetric(a["means"], a["mean_scale"], b0, b1, inner.shape[2])
    values.counts = counts.mean(axis=(0, 1))
    change += moved
    rotate_back(keys.rotation, inner, out)


DECODED: dict[str, Callable[[Any, int, int], F32]] = {
    "f16": _f16,
    "f32": _f32,
    "symmetric_keys": symmetric,
    "symmetric_values": symmetric,
    "kivi_keys": kivi_keys,
    "kivi_values": kivi_values,
    "token_keys": token_keys,
    "huffman_keys": huffman_keys,
    "huffman_values": huffman_values,
    "levels": levels,
    "sign_index": sign_index,
    "decoded": _by_itself,
}
"""Tokens t0..t1 (G, t1 - t0, D) of a codec as the numbers that it stands for: (codec, t0, t1)."""

KEYS: dict[str, Callable[[Any, F32, int, int, F32], None]] = {
    **dict.fromkeys(DECODED, _decoded_scores),
    "signs": _sign_scores,
    "centred_planes": _centred_scores,
    "plane_keys": _centred_scores,
    "page_index": _page_scores,
}
"""What scores a query with tokens t0..t1 of a codec: (codec, q (G, M, D), t0, t1, s (G, M, t1 - t0))."""

VALUES: dict[str, Callable[[Any, F32, int, int, F32], None]] = {
    **dict.fromkeys(DECODED, _decoded_sums),
    "int4": _int4_sums,
    "interleaved": _interleaved_sums,
}
"""What adds weighted values: (codec, p (G, M, t1 - t0), t0, t1, out (G, M, D))."""
