"""KIVI's codes: keys per channel over a group of tokens, values per token over a span of channels."""

from typing import Any

import numpy as np

from edgekv.kernels.contract.attention import BLOCK, LARGEST_F16
from edgekv.kernels.cpu import simd
from edgekv.kernels.cpu.codes import (
    EIGHT_BITS,
    FOUR_BITS,
    TWO_BITS,
    Parts,
    dot_four_rows,
    dot_row,
)
from edgekv.kernels.cpu.compile import Args, Scalar, fast_jit, jit
from edgekv.kernels.cpu.launch import run
from edgekv.kernels.cpu.loops import Loops, address_of, chars, floats, halves, numbers, score_loop
from edgekv.kernels.cpu.scalar import (
    as_float,
    clamp,
    float_to_half,
    get,
    maximum,
    minimum,
    put,
    round_to_even,
    round_up_to_half,
)
from edgekv.kernels.cpu.tile import TILE, decode_loop, decode_spans, decode_tokens, tiled, widen_ends
from edgekv.types import F32, U8, U16

LANES = simd.LANES
N_BITS = 6  # of the numbers of a store
ZERO, ONE = np.array([0, 1], np.float32)


def encode_kivi_keys(x: F32, codes: U8, step: U16, low: U16, t0: int) -> None:
    group = codes.shape[3]
    args = np.ascontiguousarray(x), codes, step, low, t0 // group
    run(_encode_groups, x.shape[0] * x.shape[1] // group, x.size, args)


def encode_kivi_values(x: F32, codes: U8, step: U16, low: U16, t0: int) -> None:
    args = np.ascontiguousarray(x), codes, step, low, t0
    run(_encode_tokens, x.shape[0] * x.shape[1], x.size, args)


@jit
def _encode_groups(first: int, last: int, args: Args) -> None:
    x, codes, step, low, group0 = args
    _, n_tokens, head_dim = x.shape
    n_groups, n_bytes, group = codes.shape[1:]
    n_bits = 8 * n_bytes // head_dim
    top = np.float32((1 << n_bits) - 1)
    x, codes, step, low = x.reshape(-1), codes.reshape(-1), step.reshape(-1), low.reshape(-1)
    for item in range(first, last):
        source = item * group * head_dim
        place = item // (n_tokens // group) * n_groups + group0 + item % (n_tokens // group)
        for d in range(head_dim):
            _set_range(x, source + d, group, head_dim, top, step, low, place * head_dim + d)
        for j in range(n_bytes):
            for t in range(group):
                byte = 0
                for part in range(8 // n_bits):
                    d = part * n_bytes + j
                    level = _level(get(x, source + t * head_dim + d), top, step, low, place * head_dim + d)
                    byte |= level << part * n_bits
                put(codes, (place * n_bytes + j) * group + t, np.uint8(byte))


@jit
def _encode_tokens(first: int, last: int, args: Args) -> None:
    x, codes, step, low, t0 = args
    _, n_tokens, head_dim = x.shape
    capacity, n_bytes = codes.shape[1:]
    n_spans, n_bits = step.shape[1], 8 * n_bytes // head_dim
    span, top = head_dim // n_spans, np.float32((1 << n_bits) - 1)
    x, codes, step, low = x.reshape(-1), codes.reshape(-1), step.reshape(-1), low.reshape(-1)
    for item in range(first, last):
        source, g, t = item * head_dim, item // n_tokens, t0 + item % n_tokens
        first_range = g * n_spans * capacity + t
        for i in range(n_spans):
            _set_range(x, source + i * span, span, 1, top, step, low, first_range + i * capacity)
        for j in range(n_bytes):
            byte = 0
            for part in range(8 // n_bits):
                d = part * n_bytes + j
                level = _level(get(x, source + d), top, step, low, first_range + d // span * capacity)
                byte |= level << part * n_bits
            put(codes, (g * capacity + t) * n_bytes + j, np.uint8(byte))


@jit
def _set_range(x: F32, i: int, n: int, gap: int, top: Scalar, step: U16, low: U16, place: int) -> None:
    """Step and low end of the codes of n elements from x[i] on, `gap` apart."""
    lo = hi = get(x, i)
    for k in range(i + gap, i + n * gap, gap):
        lo, hi = minimum(lo, get(x, k)), maximum(hi, get(x, k))
    bits = float_to_half(minimum(maximum(lo, -LARGEST_F16), LARGEST_F16) + ZERO)  # no -0
    put(low, place, bits)
    put(step, place, round_up_to_half(maximum(hi - as_float(bits), ZERO) / top))


@jit
def _level(x: Scalar, top: Scalar, step: U16, low: U16, place: int) -> Scalar:
    size = as_float(get(step, place))
    if size == ZERO:
        size = ONE
    position = round_to_even((x - as_float(get(low, place))) / size)
    return np.int64(clamp(position, ZERO, top))


@score_loop
def _score(store: int, q: int, rows: int, g: int, t: int, n: int, s: int, gap: int, scratch: int) -> None:
    n_bits = get(numbers(store), N_BITS)
    if n_bits == 2:
        _score_groups(TWO_BITS, store, q, rows, g, t, n, s, gap, scratch)
    elif n_bits == 4:
        _score_groups(FOUR_BITS, store, q, rows, g, t, n, s, gap, scratch)
    else:
        _score_groups(EIGHT_BITS, store, q, rows, g, t, n, s, gap, scratch)


@fast_jit
def _score_groups(
    parts: Parts, store: int, q: int, rows: int, g: int, t: int, n: int, s: int, gap: int, scratch: int
) -> None:
    head_dim, codes_at, step_at, low_at, n_groups, group, _ = _numbers(store)
    n_bytes = head_dim // len(parts)
    queries, folded, dots, to = floats(q), floats(scratch), floats(scratch + 16 * head_dim), floats(s)
    codes, step, low = chars(codes_at), halves(step_at), halves(low_at)
    for b in range(t // group, (t + n + group - 1) // group):
        i, end = max(t - b * group, 0), min(t + n - b * group, group)
        place, code = (g * n_groups + b) * head_dim, (g * n_groups + b) * n_bytes * group
        row, query = b * group - t, 0
        for _ in range(rows // 4):
            shift0 = _fold(queries, query, step, low, place, head_dim, folded, 0)
            shift1 = _fold(queries, query + head_dim, step, low, place, head_dim, folded, head_dim)
            query += 2 * head_dim
            shift2 = _fold(queries, query, step, low, place, head_dim, folded, 2 * head_dim)
            shift3 = _fold(queries, query + head_dim, step, low, place, head_dim, folded, 3 * head_dim)
            query += 2 * head_dim
            dot_four_rows(parts, folded, 0, head_dim, codes, code, n_bytes, group, dots, 0)
            _finish(dots, 0, i, end, shift0, to, row)
            _finish(dots, group, i, end, shift1, to, row + gap)
            _finish(dots, 2 * group, i, end, shift2, to, row + 2 * gap)
            _finish(dots, 3 * group, i, end, shift3, to, row + 3 * gap)
            row += 4 * gap
        for _ in range(rows % 4):
            shift0 = _fold(queries, query, step, low, place, head_dim, folded, 0)
            dot_row(parts, folded, 0, codes, code, n_bytes, group, dots, 0)
            _finish(dots, 0, i, end, shift0, to, row)
            row, query = row + gap, query + head_dim


@fast_jit
def _fold(x: F32, i: int, step: U16, low: U16, place: int, n: int, folded: F32, fold: int) -> Scalar:
    """folded = x * step for n elements, so that their codes need no scale; returns what the low ends add up to."""
    whole = n // LANES * LANES
    shifts = simd.splat(ZERO)
    for k in range(0, whole, LANES):
        a = simd.load(x, i + k)
        simd.store(folded, fold + k, simd.multiply(a, simd.load(step, place + k)))
        shifts = simd.multiply_add(a, simd.load(low, place + k), shifts)
    shift = simd.total(shifts)
    for k in range(whole, n):
        put(folded, fold + k, get(x, i + k) * as_float(get(step, place + k)))
        shift += get(x, i + k) * as_float(get(low, place + k))
    return shift


@fast_jit
def _finish(dots: F32, dot: int, first: int, last: int, shift: Scalar, s: F32, row: int) -> None:
    for t in range(first, last):
        put(s, row + t, get(dots, dot + t) + shift)


@decode_loop
def _decode_values(store: int, g: int, t: int, n: int, tile: int, scratch: int) -> None:
    _read_values(store, g, t, n, tile, scratch)


@decode_loop
def _decode_balanced(store: int, g: int, t: int, n: int, tile: int, scratch: int) -> None:
    """Keys over the balance by which they were multiplied."""
    _read_values(store, g, t, n, tile, scratch)
    head_dim, balance, to = get(numbers(store), 0), floats(get(numbers(store), 7)), floats(tile)
    for i in range(0, n * head_dim, head_dim):
        for d in range(head_dim):
            put(to, i + d, get(to, i + d) / get(balance, g * head_dim + d))


@fast_jit
def _read_values(store: int, g: int, t: int, n: int, tile: int, scratch: int) -> None:
    head_dim, codes, step, low, capacity, n_spans, n_bits = _numbers(store)
    n_bytes, steps = head_dim * n_bits // 8, scratch + 4 * TILE * n_spans
    for k in range(n_spans):
        place = (g * n_spans + k) * capacity + t
        widen_ends(low + 2 * place, n, scratch + 4 * TILE * k)
        widen_ends(step + 2 * place, n, steps + 4 * TILE * k)
    start = codes + (g * capacity + t) * n_bytes
    if n_spans == 1:
        decode_tokens(start, n_bytes, n_bits, n, scratch, steps, tile)
    else:
        decode_spans(start, n_bytes, n_bits, n, scratch, steps, head_dim // n_spans, tile)


@jit
def _numbers(store: int) -> tuple[int, int, int, int, int, int, int]:
    x = numbers(store)
    return get(x, 0), get(x, 1), get(x, 2), get(x, 3), get(x, 4), get(x, 5), get(x, N_BITS)


def _store(codec: Any, *shape: int) -> tuple[int, ...]:
    addresses = (address_of(codec.arrays[name]) for name in ("codes", "step", "low"))
    return codec.head_dim, *addresses, *shape, 8 * codec.n_bytes // codec.head_dim


def _encode_keys(codec: Any, x: F32, t0: int) -> None:
    encode_kivi_keys(x, codec.arrays["codes"], codec.arrays["step"], codec.arrays["low"], t0)


def _encode_values(codec: Any, x: F32, t0: int) -> None:
    encode_kivi_values(x, codec.arrays["codes"], codec.arrays["step"], codec.arrays["low"], t0)


LOOPS = {
    "kivi_keys": Loops(
        lambda codec: _store(codec, codec.capacity // codec.group, codec.group),
        score=_score,
        block=lambda codec: max(BLOCK, codec.group),
        scratch=lambda codec, rows: 4 * 4 * (codec.head_dim + codec.group),
        encode=_encode_keys,
    ),
    "kivi_values": tiled(
        lambda codec: _store(codec, codec.capacity, codec.spans),
        _decode_values,
        lambda codec: 8 * TILE * int(codec.spans),
        encode=_encode_values,
    ),
    "token_keys": tiled(
        lambda codec: (*_store(codec, codec.capacity, codec.spans), address_of(codec.balance)),
        _decode_balanced,
        lambda codec: 8 * TILE * int(codec.spans),
        encode=_encode_values,
    ),
}
