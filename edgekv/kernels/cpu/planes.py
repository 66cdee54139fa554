"""Keys as a centre per 16 tokens and a few bits per element, in planes that are scored by tables of sums."""

from typing import Any, NamedTuple

import numpy as np

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.contract.planes import CENTRES, LARGEST_FOUR
from edgekv.kernels.cpu.centre_products import IN_BYTES
from edgekv.kernels.cpu.centre_products import SCRATCH as NEAR_BYTES
from edgekv.kernels.cpu.compile import Scalar, fast_jit, jit
from edgekv.kernels.cpu.interleaved_values import INTERLEAVED
from edgekv.kernels.cpu.loops import AT_ONCE, Loops, address_of, chars, floats, numbers, prepare_loop, score_loop
from edgekv.kernels.cpu.plane_encoders import as_words, split
from edgekv.kernels.cpu.rope import rotate_row, rotation_numbers
from edgekv.kernels.cpu.scalar import get, maximum, put
from edgekv.kernels.cpu.scan import VECTOR, place_of_table, score_blocks, store_table
from edgekv.types import F32, U8

ZERO, ONE, HALF = np.array([0, 1, 0.5], np.float32)
MOST = np.float32(LARGEST_FOUR)
in_two_bytes = split if IN_BYTES else as_words


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


# What a head's queries become, in this order: tables (rows, 4 * width) of bytes, see `_put_tables`; P q
# (rows, width) float32; what it was rounded to, likewise; P q in two bytes (rows, 2 * width); their size and sum
# (rows, 2), then the rounding's step times the head's key_scale (rows,), float32.


@jit
def _parts_of(prepared: int, rows: int, width: int) -> tuple[int, int, int, int, int]:
    """Addresses of the parts of prepared queries."""
    rotated = prepared + 4 * rows * width
    rounded = rotated + 4 * rows * width
    words = rounded + 4 * rows * width
    return prepared, rotated, rounded, words, words + 2 * rows * width


@prepare_loop
def _prepare(store: int, q: int, rows: int, g: int, prepared: int) -> None:
    x = numbers(store)
    width, head_dim, matrix = get(x, AT.width), get(x, AT.head_dim), floats(get(x, AT.matrix))
    factors = floats(get(x, AT.query_factors) + 4 * g * head_dim)
    key_scale = get(floats(get(x, AT.key_scale)), g)
    tables_at, rotated, rounded, words, sizes = _parts_of(prepared, rows, width)
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
        size, total = in_two_bytes(floats(rotated), row, width, chars(words), 2 * row)
        put(floats(sizes), 2 * m, size)
        put(floats(sizes), 2 * m + 1, np.float32(total))
        put(floats(sizes), 2 * rows + m, key_scale * step)


@score_loop
def _score(store: int, prepared: int, rows: int, g: int, t: int, n: int, s: int, gap: int, scratch: int) -> None:
    done = 0
    while done < n:
        i = (t + done) % BLOCK
        if i == 0 and n - done >= BLOCK:
            few = (n - done) // BLOCK * BLOCK
            scan_blocks(store, prepared, rows, g, (t + done) // BLOCK, few // BLOCK, s + 4 * done, gap, scratch)
        else:
            few, part = min(BLOCK - i, n - done), scratch + NEAR_BYTES
            scan_blocks(store, prepared, rows, g, (t + done) // BLOCK, 1, part, BLOCK, scratch)
            for m in range(rows):
                for k in range(few):
                    put(floats(s), m * gap + done + k, get(floats(part), m * BLOCK + i + k))
        done += few


@fast_jit
def scan_blocks(
    store: int, prepared: int, rows: int, g: int, block: int, n_blocks: int, s: int, gap: int, scratch: int
) -> None:
    x = numbers(store)
    width, bits, of_head = get(x, AT.width), get(numbers(get(x, AT.bits)), g), g * get(x, AT.n_blocks) + block
    first = get(numbers(get(x, AT.first_plane)), g) * get(x, AT.n_blocks) + block * bits
    tables_at, _, _, words, sizes = _parts_of(prepared, rows, width)
    score_blocks(
        *(tables_at, words, sizes, sizes + 8 * rows, rows, width),
        *(get(x, AT.planes) + first * width * BLOCK // 8, bits, get(x, AT.scale) + 2 * BLOCK * of_head),
        *(get(x, AT.centres) + of_head * CENTRES * width // 2, get(x, AT.centre_step) + 2 * CENTRES * of_head),
        *(n_blocks, s, gap, scratch),
    )


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


LOOPS = {
    "centred_planes": Loops(
        _store_numbers,
        prepare=_prepare,
        score=_score,
        prepared=_prepared_bytes,
        scratch=lambda codec, rows: NEAR_BYTES + 4 * rows * BLOCK,
        at_once=AT_ONCE,
    ),
    "interleaved": INTERLEAVED,
}


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
    """Per four elements the 16 sums of + (bit 1) or - (bit 0) each, plus a middle, as `tables` wants them."""
    for column in range(width // 8):
        at = target + place_of_table(column)
        store_table(rounded, row + 8 * column, entries, at)
        store_table(rounded, row + 8 * column + 4, entries, at + VECTOR)
