"""Sums over blocks of values in 1 to 4 bits on Arm, whose dot products take four weights from a register's lane.

Words are those of `interleaved_values`. Products are most of what the two vector units do, so that other work is
kept from them. A byte's lowest or highest code takes them one instruction, those between two: the integer units
unpack most of these and hand them over through memory. A block's sum starts at the bits of 2 ** 23 as float32, so
that it is one at its end and needs a difference in place of a conversion. What sums start at is loaded: a constant
would be moved.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from edgekv.codecs.planes.value_blocks import ROWS, TO_SHIFTS, ChannelsAt, Parts, TokensAt, round_blocks
from edgekv.kernels.cpu import arm, emit
from edgekv.kernels.cpu.emit import Value
from edgekv.kernels.cpu.simd import LANES
from edgekv.kernels.interface import BLOCK

BLOCKS = BLOCKS_AHEAD = 4  # that a column is taken of at once, and whose codes are fetched meanwhile
COLUMNS = {1: 2, 2: 2, 4: 1}  # by rows, columns of four channels at a time
# By rows and bits, the codes of a byte that the integer units unpack, so that all units have about as much to do.
STORED: dict[int, dict[int, Sequence[int]]] = {
    1: {1: (1, 3, 5), 2: (1,), 4: ()},
    2: {1: range(1, 6), 2: (1, 2), 4: ()},
    4: {1: range(7), 2: range(3), 4: (0,)},
}
# In a loop's scratch: for each block steps and TO_SHIFTS bytes behind them shifts, then for each of its rows
# rounded weights and what sums start at; masks of codes of 1, 2 and 4 bits; codes unpacked.
STEPS_AT, WEIGHTS_AT, WEIGHTS_BYTES = 0, 2 * TO_SHIFTS, BLOCK + 16
BLOCKS_TOGETHER = {1: 1, 2: 1, 4: 1}  # by rows, blocks between the weights of a row and of the next one
MASKS_AT = BLOCKS * (WEIGHTS_AT + ROWS * WEIGHTS_BYTES)
CODES_AT = MASKS_AT + 32
SCRATCH = CODES_AT + 16 * max(
    COLUMNS[rows] * sum(2 * part * len(stored[part]) for part in parts)
    for rows, stored in STORED.items()
    for parts in ((1,), (2,), (2, 1), (4,))
)

BYTES, INTS, FLOATS = emit.vector(emit.I8, 16), emit.vector(emit.I32, 4), emit.vector(emit.F32, 4)
TWO_23 = np.float32(2**23)
EVERY_BYTE = 0x0101010101010101


def emit_add_blocks(
    parts: Parts, n_rows: int, b: Any, tokens: TokensAt, channels: ChannelsAt, scratch: Value
) -> None:
    """out (n_rows, head_dim) += p * scale times (codes - their middle) of all blocks of tokens.

    Channels behind the last whole column are left out. In scratch remains what was rounded last.
    """
    p, gap, scale, n_blocks = tokens
    codes, head_dim, out = channels
    bits, rounded = sum(part for part, _ in parts), functools.partial(round_blocks, 1, 1)
    middle, block_bytes = emit.F32(((1 << bits) - 1) / 2), b.mul(head_dim, emit.I64(8 * bits))
    start = emit.constant(INTS, int(TWO_23.view(np.int32)) >> len(parts) - 1)  # doubled before the second part
    for part, _ in parts:
        emit.store(b, emit.I64(((1 << part) - 1) * EVERY_BYTE), scratch, MASKS_AT + 8 * (part // 2))
    with emit.loop(b, emit.I64(0), b.add(n_blocks, emit.I64(BLOCKS - 1)), BLOCKS) as group:
        left = b.sub(n_blocks, group.i)
        n_group = b.select(b.icmp_signed("<", left, emit.I64(BLOCKS)), left, emit.I64(BLOCKS))
        with emit.loop(b, emit.I64(0), n_group, 1) as block:
            at = b.add(group.i, block.i)
            block_p = b.add(p, b.mul(at, emit.I64(4 * BLOCK)))
            block_scale = b.add(scale, b.mul(at, emit.I64(2 * BLOCK)))
            steps = _of_block(b, scratch, block.i, n_rows)
            for r in range(n_rows):
                row = TokensAt(b.add(block_p, b.mul(gap, emit.I64(4 * r))), gap, block_scale, emit.I64(1))
                weights = b.add(steps, emit.I64(WEIGHTS_AT + WEIGHTS_BYTES * r))
                step = b.add(steps, emit.I64(4 * r))
                emit.call_own(b, "round_weights_1", rounded, row, middle, weights, step)
                emit.store(b, start, weights, BLOCK)
        group_codes, unpacked = b.add(codes, b.mul(group.i, block_bytes)), b.add(scratch, emit.I64(CODES_AT))
        write, to = functools.partial(_emit_add_rounded, parts, n_rows), ChannelsAt(group_codes, head_dim, out)
        emit.call_own(b, f"add_columns_{bits}_{n_rows}", write, scratch, unpacked, n_group, to)


def _of_block(b: Any, scratch: Value, block: Value, n_rows: int) -> Value:
    """Where its steps lie."""
    return b.add(scratch, b.mul(block, emit.I64(WEIGHTS_AT + WEIGHTS_BYTES * n_rows)))


def _emit_add_rounded(
    parts: Parts, n_rows: int, b: Any, scratch: Value, unpacked: Value, n_blocks: Value, channels: ChannelsAt
) -> None:
    """out (n_rows, head_dim) += step * (weights times codes) + shift of at most BLOCKS blocks, rounded in scratch.

    unpacked: room for codes.
    """
    codes, head_dim, out = channels
    line_bytes = b.mul(head_dim, emit.I64(4))
    block_bytes = b.mul(line_bytes, emit.I64(2 * sum(part for part, _ in parts)))
    # Loaded, they are shifted and masked in one instruction; of a constant LLVM makes two.
    masks = {part: emit.load(b, emit.I64, scratch, MASKS_AT + 8 * (part // 2)) for part, _ in parts}
    with emit.loop(b, emit.I64(0), n_blocks, 1, [emit.constant(FLOATS, 0)]) as block:
        shift = emit.load(b, FLOATS, _of_block(b, scratch, block.i, n_rows), TO_SHIFTS)
        block.following = [b.fadd(block.values[0], shift)]
    (shifts,), n_columns = block.values, COLUMNS[n_rows]
    each = [(r, c) for r in range(n_rows) for c in range(n_columns)]
    with emit.loop(b, emit.I64(0), b.and_(head_dim, emit.I64(-LANES)), 4 * n_columns) as channel:
        rows = [b.add(channel.i, b.mul(head_dim, emit.I64(r))) for r in range(n_rows)]
        targets = [b.add(out, b.mul(row, emit.I64(4))) for row in rows]
        so_far = [
            b.fadd(emit.load(b, FLOATS, targets[r], 16 * c), emit.lanes(b, shifts, [r] * 4)) for r, c in each
        ]
        first = b.add(codes, b.mul(channel.i, emit.I64(4)))
        with emit.loop(b, emit.I64(0), n_blocks, 1, so_far) as block:
            place = b.add(first, b.mul(block.i, block_bytes))
            steps = _of_block(b, scratch, block.i, n_rows)
            columns = [b.add(place, emit.I64(16 * c)) for c in range(n_columns)]
            sums = _emit_float_sums(parts, n_rows, b, steps, columns, line_bytes, block_bytes, masks, unpacked)
            step = emit.load(b, FLOATS, steps)
            block.following = [
                emit.multiply_add(b, sums[r][c], emit.lanes(b, step, [r] * 4), x)
                for (r, c), x in zip(each, block.values, strict=True)
            ]
        for (r, c), x in zip(each, block.values, strict=True):
            emit.store(b, x, targets[r], 16 * c)


def _emit_float_sums(
    parts: Parts,
    n_rows: int,
    b: Any,
    steps: Value,
    columns: Sequence[Value],
    line_bytes: Value,
    block_bytes: Value,
    masks: dict[int, Value],
    unpacked: Value,
) -> list[list[Value]]:
    """sums[r][c] (four float32) of the weights of row r, behind a block's steps, times the codes of column c."""
    starts = [b.add(steps, emit.I64(WEIGHTS_AT + WEIGHTS_BYTES * r)) for r in range(n_rows)]
    words = [[emit.load(b, INTS, start, 16 * j) for j in range(BLOCK // 16)] for start in starts]
    sums = [[emit.load(b, INTS, start, BLOCK)] * len(columns) for start in starts]
    ahead, n_unpacked = b.mul(block_bytes, emit.I64(BLOCKS_AHEAD)), 0
    for part, first_line in parts:
        if first_line:
            sums = [[b.add(x, x) for x in row] for row in sums]
        stored = STORED[n_rows][part]
        for line in range(2 * part):
            offset, codes = b.mul(line_bytes, emit.I64(first_line + line)), []
            emit.prefetch(b, b.add(b.add(columns[0], offset), ahead), 1)
            for column in columns:
                room = b.add(unpacked, emit.I64(16 * n_unpacked))
                codes.append(_unpacked(b, part, stored, b.add(column, offset), masks[part], room))
                n_unpacked += len(stored)
            for i, of_columns in enumerate(zip(*codes, strict=True)):
                quad = line + 2 * part * i
                for r in range(n_rows):
                    word = emit.lanes(b, words[r][quad // 4], [quad % 4] * 4)
                    pairs = zip(of_columns, sums[r], strict=True)
                    sums[r] = [arm.add_products(b, code, word, x, "u") for code, x in pairs]
    exact = emit.constant(FLOATS, TWO_23)
    return [[emit.subtract(b, b.bitcast(x, FLOATS), exact) for x in row] for row in sums]


def _unpacked(b: Any, part: int, stored: Sequence[int], address: Value, mask: Value, room: Value) -> list[Value]:
    """The codes of 16 bytes, each byte's lowest first; those of ``stored`` by way of memory, the room for them."""
    halves = [emit.load(b, emit.I64, address, i) for i in (0, 8)]  # before the vector, or they are taken from it
    packed, count = emit.load(b, BYTES, address), 8 // part
    for place, i in enumerate(stored):
        for j, half in enumerate(halves):
            code = b.and_(b.lshr(half, emit.I64(part * i)) if i else half, mask)
            emit.store(b, code, room, 16 * place + 8 * j)
    codes = []
    for i in range(count):
        if i in stored:
            codes.append(emit.load(b, BYTES, room, 16 * stored.index(i)))
            continue
        code = b.lshr(packed, emit.constant(BYTES, part * i)) if i else packed
        last = i == count - 1
        codes.append(code if last else b.and_(code, emit.constant(BYTES, (1 << part) - 1)))
    return codes
