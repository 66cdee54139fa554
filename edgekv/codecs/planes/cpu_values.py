"""Values in 1 to 4 bits, four tokens side by side, summed with 8-bit weights in integer dot products.

    row       a query's probabilities p, and its sums (head_dim,); rows share what is unpacked of codes
    block     BLOCK tokens; their codes are 2 * bits lines
    line      head_dim words of 32 bits, one for each channel: a byte for each token of a quad. A part's line i has
              quad i in its bytes' lowest bits, quad i + 2 * part in the next ones, and so on
    quad      four tokens, one behind the other
    part      bits of a code that are stored together, a divisor of 8 (`PARTS`)
    column    as many channels as a vector has lanes

The sums of whole blocks and columns are made by `value_blocks` or `arm_values`; what is no whole block is copied
to scratch first, and channels behind the last whole column follow one by one.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
from numba import types

from edgekv.codecs.planes import arm_values, value_blocks
from edgekv.codecs.planes.value_blocks import ROWS, ChannelsAt, TokensAt, copy_floats, copy_halves
from edgekv.kernels.cpu import arm, emit
from edgekv.kernels.cpu.compile import fast_jit, intrinsic
from edgekv.kernels.cpu.loops import AT_ONCE, Loops, add_loop, address_of, chars, finish_loop, floats, numbers
from edgekv.kernels.cpu.rope import rotate_back_row, rotation_numbers
from edgekv.kernels.cpu.scalar import get, put
from edgekv.kernels.cpu.simd import LANES
from edgekv.kernels.interface import BLOCK
from edgekv.types import F32

ROW_COUNTS = 1, 2, 4  # rows that are added together: fours while there are, then a pair, then one
# Bits of a code, in parts that divide a byte: (bits, lines of the block before them).
PARTS = {1: ((1, 0),), 2: ((2, 0),), 3: ((2, 0), (1, 4)), 4: ((4, 0),)}
SUMS: Any = arm_values if arm.IS_ARM and arm.has_dot() else value_blocks
# What compiled code takes of it: where rounded weights and steps are in scratch, and by rows how many blocks lie
# between those of a row and of the next one.
WEIGHTS_AT, WEIGHTS_BYTES, STEPS_AT = SUMS.WEIGHTS_AT, SUMS.WEIGHTS_BYTES, SUMS.STEPS_AT
BLOCKS_OF_1_ROW, BLOCKS_OF_2_ROWS, BLOCKS_OF_4_ROWS = (SUMS.BLOCKS_TOGETHER[n] for n in ROW_COUNTS)
# Behind that in scratch: copies of scales, float16, and of p, float32, of what is no whole block.
SCALES_AT = SUMS.SCRATCH
P_AT = SCALES_AT + 2 * BLOCK
SCRATCH = P_AT + 4 * ROWS * BLOCK


class ValueNumbers(NamedTuple):
    """What the loops get of a codec: addresses of its arrays, sizes, and its rotation."""

    codes: int
    scale: int
    capacity: int
    n_blocks: int
    bits: int  # the address of each head's, as that of first_plane
    head_dim: int
    is_hadamard: int
    matrix: int  # of the rotation; its signs if it is a Hadamard transform
    inverse: int
    first_plane: int


AT = ValueNumbers(*range(len(ValueNumbers._fields)))  # where each stands


@intrinsic
def _add_blocks(
    context: Any,
    bits: Any,
    rows: Any,
    p: Any,
    gap: Any,
    scale: Any,
    n_blocks: Any,
    codes: Any,
    head_dim: Any,
    out: Any,
    scratch: Any,
) -> Any:
    """`value_blocks.emit_add_blocks` for bits of `PARTS` and rows of ROW_COUNTS, or that of `arm_values`."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        bits, rows, p, gap, scale, n_blocks, codes, head_dim, out, scratch = args
        tokens, channels = TokensAt(p, gap, scale, n_blocks), ChannelsAt(codes, head_dim, out)
        end = b.append_basic_block("end")
        cases = b.switch(b.add(b.mul(bits, emit.I64(8)), rows), end)
        for n_bits, parts in PARTS.items():
            for n_rows in ROW_COUNTS:
                case = b.append_basic_block("case")
                cases.add_case(emit.I64(8 * n_bits + n_rows), case)
                b.position_at_end(case)
                write = functools.partial(SUMS.emit_add_blocks, parts, n_rows)
                emit.call_own(b, f"add_blocks_{n_bits}_{n_rows}", write, tokens, channels, scratch)
                b.branch(end)
        b.position_at_end(end)
        return context.get_dummy_value()

    return types.none(*[types.intp] * 10), build


@add_loop
def _add(store: int, p: int, gap: int, rows: int, g: int, t: int, n: int, out: int, scratch: int) -> None:
    x = numbers(store)
    bits, head_dim, scales = get(numbers(get(x, AT.bits)), g), get(x, AT.head_dim), get(x, AT.scale)
    scales += 2 * g * get(x, AT.capacity)
    has_whole_columns, done = head_dim % LANES == 0, 0
    while done < n:
        i = (t + done) % BLOCK
        n_tokens, p_at, p_gap, scale = min(BLOCK - i, n - done), p + 4 * done, gap, scales + 2 * (t + done - i)
        if n_tokens < BLOCK:
            copy_halves(scale + 2 * i, i, n_tokens, scratch + SCALES_AT)
            scale = scratch + SCALES_AT
        elif has_whole_columns:  # all whole blocks at once; else the last rounded weights are needed of each
            n_tokens = (n - done) // BLOCK * BLOCK
        plane = get(numbers(get(x, AT.first_plane)), g) * get(x, AT.n_blocks) + (t + done) // BLOCK * bits
        codes, m = get(x, AT.codes) + 8 * head_dim * plane, 0
        while m < rows:
            n_rows = 4 if rows - m >= 4 else 2 if rows - m >= 2 else 1
            row_p, target = p_at + 4 * gap * m, out + 4 * m * head_dim
            if n_tokens < BLOCK:
                for r in range(n_rows):
                    copy_floats(row_p + 4 * gap * r, i, n_tokens, scratch + P_AT + 4 * BLOCK * r)
                row_p, p_gap = scratch + P_AT, BLOCK
            n_blocks = max(n_tokens // BLOCK, 1)
            _add_blocks(bits, n_rows, row_p, p_gap, scale, n_blocks, codes, head_dim, target, scratch)
            for d in range(head_dim // LANES * LANES, head_dim):
                for r in range(n_rows):
                    _add_channel(
                        bits, scratch, r, n_rows, codes + 4 * d, head_dim, floats(target), r * head_dim + d
                    )
            m += n_rows
        done += n_tokens


@finish_loop
def _finish(store: int, sums: int, out: int, rows: int) -> None:
    x = numbers(store)
    d, matrix, inverse = get(x, AT.head_dim), floats(get(x, AT.matrix)), floats(get(x, AT.inverse))
    for m in range(rows):
        row = m * d
        rotate_back_row(floats(sums), row, d, matrix, inverse, get(x, AT.is_hadamard), floats(out), row, d)


def _store_numbers(codec: Any) -> ValueNumbers:
    a = codec.arrays
    return ValueNumbers(
        **{name: address_of(a[name]) for name in ("codes", "scale")},
        **{name: address_of(getattr(codec, name)) for name in ("bits", "first_plane")},
        **{"capacity": codec.capacity, "n_blocks": a["codes"].shape[1], "head_dim": codec.head_dim},
        **rotation_numbers(codec.rotation),
    )


VALUES = Loops(_store_numbers, add=_add, finish=_finish, scratch=lambda codec, rows: SCRATCH, at_once=AT_ONCE)


@fast_jit
def _add_channel(
    bits: int, scratch: int, r: int, rows: int, codes: int, head_dim: int, out: F32, target: int
) -> None:
    """out[target] += row r of ``rows`` times a channel of the block rounded last; codes: that channel's words."""
    place = r * (BLOCKS_OF_1_ROW if rows == 1 else BLOCKS_OF_2_ROWS if rows == 2 else BLOCKS_OF_4_ROWS)
    packed, steps = chars(codes), floats(scratch + STEPS_AT + 4 * place)
    weights = chars(scratch + WEIGHTS_AT + place * WEIGHTS_BYTES)
    part, worth = (2, 2) if bits == 3 else (bits, 1)
    first_line = total = 0
    while first_line < 2 * bits:
        for line in range(2 * part):
            for i in range(4):
                byte = np.int64(get(packed, (first_line + line) * 4 * head_dim + i))
                for field in range(8 // part):
                    weight = np.int64(get(weights, 4 * (line + field * 2 * part) + i))
                    total += worth * weight * (byte >> field * part & (1 << part) - 1)
        first_line, part, worth = first_line + 2 * part, 1, 1
    put(out, target, get(out, target) + get(steps, 0) * np.float32(total) + get(steps, ROWS))
