"""Keys as a centre per 16 tokens and a few bits per element, in planes that are scored by tables of sums."""

from typing import Any, NamedTuple

import numpy as np

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.contract.planes import CENTRE, CENTRES, LARGEST_FOUR
from edgekv.kernels.cpu import simd, tables
from edgekv.kernels.cpu.centres import centre_scores, split
from edgekv.kernels.cpu.jit import Scalar, fast_jit, jit
from edgekv.kernels.cpu.loops import (
    Loops,
    address_of,
    chars,
    floats,
    halves,
    numbers,
    prepare_loop,
    score_loop,
)
from edgekv.kernels.cpu.rotate import rotate_row, rotation_numbers
from edgekv.kernels.cpu.scalar import get, maximum, put
from edgekv.types import F32, U8, U16

LANES = simd.LANES
LINE = 64  # bytes
CHUNK = 128  # channels whose sums fit 16 bits in four planes
BLOCKS_AHEAD = 4
NEAR = BLOCK // CENTRE  # centres' scores of a row
MIDDLE_ENTRY = 64  # added to an entry, so that it is at least 0
ZERO, ONE, HALF = np.array([0, 1, 0.5], np.float32)
MOST = np.float32(LARGEST_FOUR)


class KeyNumbers(NamedTuple):
    """What the loops get of a codec: addresses of its arrays, sizes, and its rotation."""

    planes: int
    scale: int
    centres: int
    centre_step: int
    n_blocks: int
    width: int
    bits: int  # the address of each head's, as those of key_scale and first_plane
    key_scale: int
    head_dim: int
    is_hadamard: int
    matrix: int  # of the rotation; its signs if it is a Hadamard transform
    inverse: int
    first_plane: int
    query_factors: int  # (G, head_dim), of the queries before they are rotated


AT = KeyNumbers(*range(len(KeyNumbers._fields)))  # where each stands


class Place(NamedTuple):
    """What a row meets: where its tables begin, where the block's planes do, how many these are, their width."""

    row: int
    block: int
    bits: int
    width: int


# What a head's queries become, in this order: tables (rows, 4 * width) of bytes, see `_put_tables`; P q
# (rows, width) float32; what it was rounded to, likewise; P q in two bytes (rows, 2, width); the rounding's step
# (rows,), then size and sum of the two bytes (rows, 2), float32.


@jit
def parts_of(prepared: int, rows: int, width: int) -> tuple[int, int, int, int, int]:
    """Addresses of the parts of prepared queries."""
    rotated = prepared + 4 * rows * width
    rounded = rotated + 4 * rows * width
    split_at = rounded + 4 * rows * width
    return prepared, rotated, rounded, split_at, split_at + 2 * rows * width


@prepare_loop
def _prepare(store: int, q: int, rows: int, g: int, prepared: int) -> None:
    x = numbers(store)
    width, head_dim, matrix = get(x, AT.width), get(x, AT.head_dim), floats(get(x, AT.matrix))
    factors = floats(get(x, AT.query_factors) + 4 * g * head_dim)
    tables_at, rotated, rounded, split_at, steps = parts_of(prepared, rows, width)
    for m in range(rows):
        row = m * width
        for d in range(head_dim):
            put(floats(rounded), row + d, get(floats(q), m * head_dim + d) * get(factors, d))
        rotate_row(
            *(floats(rounded), row, head_dim, matrix, matrix, get(x, AT.is_hadamard)),
            *(width, floats(rotated), row),
        )
        step = _round_query(floats(rotated), row, width, floats(rounded))
        _put_tables(floats(rounded), row, width, chars(tables_at), 4 * row)
        for d in range(row, row + width):
            put(floats(rounded), d, get(floats(rounded), d) * step)
        put(floats(steps), m, step)
        size, total = split(floats(rotated), row, width, chars(split_at), 2 * row)
        put(floats(steps), rows + 2 * m, size)
        put(floats(steps), rows + 2 * m + 1, np.float32(total))


@score_loop
def _score(store: int, prepared: int, rows: int, g: int, t: int, n: int, s: int, gap: int, scratch: int) -> None:
    x = numbers(store)
    planes, scale = chars(get(x, AT.planes)), halves(get(x, AT.scale))
    centres, centre_step = chars(get(x, AT.centres)), halves(get(x, AT.centre_step))
    width, n_blocks = get(x, AT.width), get(x, AT.n_blocks)
    bits, key_scale = get(numbers(get(x, AT.bits)), g), get(floats(get(x, AT.key_scale)), g)
    tables_at, _, _, split_at, steps = parts_of(prepared, rows, width)
    block, i, block_bytes = t // BLOCK, t % BLOCK, bits * width * BLOCK // 8
    code = get(numbers(get(x, AT.first_plane)), g) * n_blocks * width * BLOCK // 8 + block * block_bytes
    stored = g * n_blocks + block
    _prefetch(planes, code + BLOCKS_AHEAD * block_bytes, block_bytes)
    _prefetch(centres, (stored + BLOCKS_AHEAD) * CENTRES * width // 2, CENTRES * width // 2)
    simd.prefetch(scale, (stored + BLOCKS_AHEAD) * BLOCK)
    simd.prefetch(scale, (stored + BLOCKS_AHEAD) * BLOCK + BLOCK // 2)
    near, target = floats(scratch), floats(s)
    whole = n == BLOCK
    for m in range(0, rows, 2):
        pair = min(2, rows - m)
        for r in range(pair):
            size, total = get(floats(steps), rows + 2 * (m + r)), get(floats(steps), rows + 2 * (m + r) + 1)
            query = 2 * (m + r) * width
            centre_scores(chars(split_at), query, width, size, total, centres, centre_step, stored, near, NEAR * r)
        into, column, apart = (target, m * gap, gap) if whole else (near, 2 * NEAR, BLOCK)
        factor = key_scale * get(floats(steps), m)
        at = Place(4 * m * width, code, bits, width)
        if pair == 1:
            _scan_row(chars(tables_at), planes, at, into, column, factor, scale, stored * BLOCK, near)
        else:
            other = key_scale * get(floats(steps), m + 1)
            _scan_two_rows(
                chars(tables_at), planes, at, into, column, apart, factor, other, scale, stored * BLOCK, near
            )
        if not whole:
            for r in range(pair):
                for k in range(n):
                    put(target, (m + r) * gap + k, get(near, 2 * NEAR + r * BLOCK + i + k))


@fast_jit
def _prefetch(x: U8, start: int, n: int) -> None:
    for i in range(start, start + n, LINE):
        simd.prefetch(x, i)


def _store_numbers(codec: Any) -> KeyNumbers:
    a, of_heads = codec.arrays, ("bits", "key_scale", "first_plane", "query_factors")
    return KeyNumbers(
        **{name: address_of(a[name]) for name in ("planes", "scale", "centres", "centre_step")},
        **{name: address_of(getattr(codec, name)) for name in of_heads},
        **{"n_blocks": a["planes"].shape[1], "width": codec.width, "head_dim": codec.head_dim},
        **rotation_numbers(codec.rotation),
    )


def _prepared_bytes(codec: Any, rows: int) -> int:
    size: int = rows * (14 * codec.width + 12)
    return size


CENTRED = Loops(
    _store_numbers,
    prepare=_prepare,
    score=_score,
    prepared=_prepared_bytes,
    scratch=lambda codec, rows: 4 * 2 * (NEAR + BLOCK),
)
LOOPS = dict.fromkeys(("centred_planes", "plane_keys"), CENTRED)


@jit
def _round_query(q: F32, row: int, width: int, rounded: F32) -> Scalar:
    """rounded[row:][:width] = `reference.planes.round_queries` of q[row:][:width]; returns the step."""
    largest = ZERO
    for d in range(row, row + width, 4):
        four = abs(get(q, d)) + abs(get(q, d + 1)) + abs(get(q, d + 2)) + abs(get(q, d + 3))
        largest = maximum(largest, four)
    step = largest / MOST
    divisor = ONE if step == ZERO else step
    for d in range(row, row + width):
        put(rounded, d, np.float32(np.floor(get(q, d) / divisor)) + HALF)
    return step


@jit
def _put_tables(rounded: F32, row: int, width: int, entries: U8, target: int) -> None:
    """Per four elements the 16 sums of + (bit 1) or - (bit 0) each, plus MIDDLE_ENTRY, as `tables` wants them."""
    for column in range(width // 8):
        at = target + column // tables.COLUMNS * 2 * tables.VECTOR + column % tables.COLUMNS * 16
        tables.store_table(rounded, row + 8 * column, entries, at)
        tables.store_table(rounded, row + 8 * column + 4, entries, at + tables.VECTOR)


@fast_jit
def _scan_row(
    entries: U8, planes: U8, at: Place, s: F32, column: int, factor: Scalar, scale: U16, token: int, near: F32
) -> None:
    """s[column:][:64] = near + factor * scale * (a row's sums over all planes of a block)."""
    row, block, bits, width = at
    group = 2 * width
    for chunk in range(0, width, CHUNK):
        channels = min(CHUNK, width - chunk)
        a0 = a1 = a2 = a3 = tables.none()
        for p in range(bits):
            a0, a1, a2, a3 = tables.twice(a0), tables.twice(a1), tables.twice(a2), tables.twice(a3)
            code = block + 4 * p * group + 2 * chunk
            for v in range(0, 2 * channels, tables.VECTOR):
                t, c = row + 4 * chunk + 2 * v, code + v
                a0 = tables.add_entries(entries, t, planes, c, a0)
                a1 = tables.add_entries(entries, t, planes, c + group, a1)
                a2 = tables.add_entries(entries, t, planes, c + 2 * group, a2)
                a3 = tables.add_entries(entries, t, planes, c + 3 * group, a3)
        less = ((1 << bits) - 1) * MIDDLE_ENTRY * (channels // 4)
        if chunk == 0:
            tables.store_scores(s, column, (a0, a1, a2, a3), less, factor, scale, token, near, 0)
        else:
            tables.add_scores(s, column, (a0, a1, a2, a3), less, factor, scale, token)


@fast_jit
def _scan_two_rows(
    entries: U8,
    planes: U8,
    at: Place,
    s: F32,
    column: int,
    gap: int,
    factor: Scalar,
    other_factor: Scalar,
    scale: U16,
    token: int,
    near: F32,
) -> None:
    """`_scan_row` of a row and the next, which is stored ``gap`` behind: they share each load of a key."""
    row, block, bits, width = at
    group, other = 2 * width, 4 * width
    for chunk in range(0, width, CHUNK):
        channels = min(CHUNK, width - chunk)
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = tables.none()
        for p in range(bits):
            a0, a1, a2, a3 = tables.twice(a0), tables.twice(a1), tables.twice(a2), tables.twice(a3)
            b0, b1, b2, b3 = tables.twice(b0), tables.twice(b1), tables.twice(b2), tables.twice(b3)
            code = block + 4 * p * group + 2 * chunk
            for v in range(0, 2 * channels, tables.VECTOR):
                t, c = row + 4 * chunk + 2 * v, code + v
                a0 = tables.add_entries(entries, t, planes, c, a0)
                b0 = tables.add_entries(entries, t + other, planes, c, b0)
                a1 = tables.add_entries(entries, t, planes, c + group, a1)
                b1 = tables.add_entries(entries, t + other, planes, c + group, b1)
                a2 = tables.add_entries(entries, t, planes, c + 2 * group, a2)
                b2 = tables.add_entries(entries, t + other, planes, c + 2 * group, b2)
                a3 = tables.add_entries(entries, t, planes, c + 3 * group, a3)
                b3 = tables.add_entries(entries, t + other, planes, c + 3 * group, b3)
        less = ((1 << bits) - 1) * MIDDLE_ENTRY * (channels // 4)
        if chunk == 0:
            tables.store_scores(s, column, (a0, a1, a2, a3), less, factor, scale, token, near, 0)
            tables.store_scores(s, column + gap, (b0, b1, b2, b3), less, other_factor, scale, token, near, NEAR)
        else:
            tables.add_scores(s, column, (a0, a1, a2, a3), less, factor, scale, token)
            tables.add_scores(s, column + gap, (b0, b1, b2, b3), less, other_factor, scale, token)
