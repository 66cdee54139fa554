"""Values in 1 to 4 bits, four tokens side by side, summed with 8-bit weights in integer dot products.

    row       a query's probabilities p, and its sums (head_dim,); rows share what is unpacked of codes
    block     BLOCK tokens; their codes are 2 * bits lines
    line      head_dim words of 32 bits, one for each channel: a byte for each token of a quad. A part's line i has
              quad i in its bytes' lowest bits, quad i + 2 * part in the next ones, and so on
    quad      four tokens, one behind the other
    part      bits of a code that are stored together, a divisor of 8 (`PARTS`)
    column    as many channels as a vector has lanes

Weights are p * scale, rounded: scale is one float16 of a token's value. A rounded weight stands for itself times
the step of its row and block. What is no whole block is copied to scratch first, and channels behind the last
whole column follow one by one.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import types

from edgekv.codecs.planes import LEAST_WEIGHT
from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.byte_products import INTS, products
from edgekv.kernels.cpu.compile import fast_jit, intrinsic
from edgekv.kernels.cpu.emit import LANES, Value
from edgekv.kernels.cpu.loops import (
    AT_ONCE,
    CodecKernels,
    add_loop,
    address_of,
    chars,
    finish_loop,
    floats,
    numbers,
)
from edgekv.kernels.cpu.rope import rotate_back_row, rotation_numbers
from edgekv.kernels.cpu.scalar import ROUND, get, put, widen
from edgekv.kernels.interface import BLOCK
from edgekv.types import F32

ROW_COUNTS = 1, 2, 4  # rows that are added together: fours while there are, then a pair, then one
# Bits of a code, in parts that divide a byte: (bits, lines of the block before them).
PARTS = {1: ((1, 0),), 2: ((2, 0),), 3: ((2, 0), (1, 4)), 4: ((4, 0),)}
ROUND_BITS = int(ROUND.view(np.int32))
ROWS = 4  # at most, that share each unpacked code
TO_SHIFTS = 4 * ROWS  # bytes from a step to its shift: behind the steps of all rows
TOP_WEIGHT = 255  # the largest one that is rounded to a byte
WEIGHT_LANES = 16
WEIGHTS, WEIGHT_INTS, HALVES, BYTES = (
    emit.vector(kind, WEIGHT_LANES) for kind in (emit.F32, emit.I32, emit.I16, emit.I8)
)


class TokensAt(NamedTuple):
    """Blocks of tokens inside a kernel: the first token's probability and scale, and how many blocks there are."""

    p: Value  # float32
    gap: Value  # float32s from a row's to the next row's
    scale: Value  # float16
    n_blocks: Value


def _copying(kind: Any, n_bytes: int) -> Callable[..., None]:
    @intrinsic
    def copy(context: Any, x: Any, i: Any, n: Any, y: Any) -> Any:
        """y = n numbers x for the tokens i.. of a block, 0 for its others."""

        def write(b: Any, x: Any, i: Any, n: Any, y: Any) -> None:
            for offset in range(0, n_bytes * BLOCK, WEIGHT_LANES):
                emit.store(b, emit.constant(BYTES, 0), y, offset)
            first = b.add(y, b.mul(i, emit.I64(n_bytes)))
            with emit.loop(b, emit.I64(0), n, 1) as turn:
                at = b.mul(turn.i, emit.I64(n_bytes))
                emit.store(b, emit.load(b, kind, b.add(x, at)), b.add(first, at))

        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            emit.call_own(builder, f"copy_{n_bytes}", write, *args)
            return context.get_dummy_value()

        return types.none(*[types.intp] * 4), build

    return copy


copy_floats, copy_halves = _copying(emit.F32, 4), _copying(emit.I16, 2)


def scaled(builder: Any, p: Value, scale: Value) -> list[Value]:
    """p * scale of a block's tokens: BLOCK float32 in vectors of WEIGHT_LANES."""
    parts = range(0, BLOCK, WEIGHT_LANES)
    weights = (emit.load(builder, WEIGHTS, p, 4 * t) for t in parts)
    scales = (widen(builder, emit.load(builder, HALVES, scale, 2 * t)) for t in parts)
    return [builder.fmul(weight, width) for weight, width in zip(weights, scales, strict=True)]


def all_rounded(builder: Any, blocks: list[list[Value]]) -> tuple[list[list[Value]], Value]:
    """Rounds the scaled weights of one block, or of four, to integers up to TOP_WEIGHT; also returns their step.

    The steps of four blocks are a vector.
    """
    top = emit.all_lanes(builder, emit.maximum, [emit.tree(builder, emit.maximum, x) for x in blocks])
    least, most = (emit.constant(top.type, np.float32(x)) for x in (LEAST_WEIGHT, TOP_WEIGHT))
    factors = builder.fdiv(most, emit.maximum(builder, top, least))
    shifted, round_ = [], emit.constant(WEIGHTS, ROUND)
    for i, weights in enumerate(blocks):
        if len(blocks) == 1:
            factor = emit.splat(builder, factors, WEIGHT_LANES)
        else:
            factor = emit.lanes(builder, factors, [i] * WEIGHT_LANES)
        shifted.append([emit.multiply_add(builder, weight, factor, round_) for weight in weights])
    return shifted, builder.fmul(top, emit.constant(top.type, np.float32(1 / TOP_WEIGHT)))


def round_blocks(
    n_rows: int, together: int, b: Any, tokens: TokensAt, middle: Value, weights: Value, steps: Value
) -> None:
    """weights (n_rows, together, BLOCK) uint8 = p * scale, rounded, of blocks; of missing ones the last is taken.

    steps (n_rows, together) float32, and TO_SHIFTS bytes behind each its shift: what the sum of p * scale times
    (code - middle) has beyond that of p * scale times codes. n_rows * together is 1 or 4.
    """
    p, gap, scale, n_blocks = tokens
    last = b.sub(n_blocks, emit.I64(1))
    numbers = [emit.I64(i) for i in range(together)]
    blocks = [b.select(b.icmp_signed("<", i, last), i, last) for i in numbers] if together > 1 else numbers
    exact = [
        scaled(
            b,
            b.add(p, b.add(b.mul(gap, emit.I64(4 * r)), b.mul(block, emit.I64(4 * BLOCK)))),
            b.add(scale, b.mul(block, emit.I64(2 * BLOCK))),
        )
        for r in range(n_rows)
        for block in blocks
    ]
    shifted, step = all_rounded(b, exact)
    for i, x in enumerate(shifted):
        for j, part in enumerate(x):  # ROUND's lowest byte is 0
            emit.store(b, b.trunc(b.bitcast(part, WEIGHT_INTS), BYTES), weights, BLOCK * i + WEIGHT_LANES * j)
    sums = [emit.tree(b, emit.add, [b.bitcast(x, WEIGHT_INTS) for x in block]) for block in shifted]
    total = emit.all_lanes(b, emit.add, sums)
    total = b.sub(total, emit.constant(total.type, BLOCK * ROUND_BITS & 0xFFFFFFFF))
    middles = middle if len(exact) == 1 else emit.splat(b, middle, len(exact))
    shift = b.fmul(b.fmul(step, middles), b.sitofp(total, step.type))
    emit.store(b, step, steps)
    emit.store(b, b.fneg(shift), steps, TO_SHIFTS)


Parts = tuple[tuple[int, int], ...]  # of a code: (bits, lines of a block before it)

# By rows, blocks whose weights are rounded before they are used, and rows of which this is done at once: four
# rounded together share their ways across lanes, where registers hold them.
BLOCKS_TOGETHER = {1: 4, 2: 2, 4: 1} if emit.REGISTER == 16 else {1: 1, 2: 1, 4: 1}
ROWS_TOGETHER = {1: 1, 2: 2, 4: 4} if emit.REGISTER == 16 else {1: 1, 2: 1, 4: 1}
# In a loop's scratch: bytes before the rounded weights [row][block], of a block of them, and before their steps,
# [row][block] float32 with shifts TO_SHIFTS bytes behind; bytes in all.
WEIGHTS_AT, WEIGHTS_BYTES, STEPS_AT = 0, BLOCK, ROWS * BLOCK
SUMS_SCRATCH = STEPS_AT + 2 * TO_SHIFTS
BLOCKS_AHEAD = 4  # whose codes are fetched
# By rows, columns at a time: as many sums as hide a product's latency, and fit the registers.
COLUMNS = {
    1: (2, 1) if emit.IS_ARM else (4, 1),
    2: (2, 1),
    4: (1,) if emit.IS_ARM or emit.FEW_REGISTERS else (2, 1),
}
FLOATS = emit.vector(emit.F32, LANES)


class ChannelsAt(NamedTuple):
    """Codes of blocks inside a kernel, and the sums that they are added to: addresses, and channels of a token."""

    codes: Value
    head_dim: Value
    out: Value  # (rows, head_dim) float32


def emit_add_blocks(
    parts: Parts, n_rows: int, b: Any, tokens: TokensAt, channels: ChannelsAt, scratch: Value
) -> None:
    """out (n_rows, head_dim) += p * scale times (codes - their middle) of all blocks of tokens.

    Channels behind the last whole column are left out. In scratch remains what `round_blocks` put there last.
    """
    p, gap, scale, n_blocks = tokens
    codes, head_dim, out = channels
    bits, together = sum(part for part, _ in parts), BLOCKS_TOGETHER[n_rows]
    middle = emit.F32(((1 << bits) - 1) / 2)
    block_bytes = b.mul(head_dim, emit.I64(8 * bits))
    with emit.loop(b, emit.I64(0), b.add(n_blocks, emit.I64(together - 1)), together) as group:
        left = b.sub(n_blocks, group.i)
        n_group = b.select(b.icmp_signed("<", left, emit.I64(together)), left, emit.I64(together))
        group_p = b.add(p, b.mul(group.i, emit.I64(4 * BLOCK)))
        group_scale = b.add(scale, b.mul(group.i, emit.I64(2 * BLOCK)))
        n_rounded = ROWS_TOGETHER[n_rows]
        for row in range(0, n_rows, n_rounded):
            row_p = b.add(group_p, b.mul(gap, emit.I64(4 * row)))
            write = functools.partial(round_blocks, n_rounded, together)
            weights, steps = b.add(scratch, emit.I64(row * BLOCK)), b.add(scratch, emit.I64(STEPS_AT + 4 * row))
            these = TokensAt(row_p, gap, group_scale, n_group)
            emit.call_own(b, f"round_weights_{n_rounded}", write, these, middle, weights, steps)
        with emit.loop(b, emit.I64(0), n_group, 1) as block:
            weights = b.add(scratch, b.mul(block.i, emit.I64(BLOCK)))
            steps = b.add(scratch, b.add(emit.I64(STEPS_AT), b.mul(block.i, emit.I64(4))))
            block_codes = b.add(codes, b.mul(b.add(group.i, block.i), block_bytes))
            write = functools.partial(_emit_add_block, parts, n_rows)
            to = ChannelsAt(block_codes, head_dim, out)
            emit.call_own(b, f"add_columns_{bits}_{n_rows}", write, weights, steps, to)


def _emit_add_block(parts: Parts, n_rows: int, b: Any, weights: Value, steps: Value, channels: ChannelsAt) -> None:
    """out (n_rows, head_dim) += step * (weights times the block's codes) + shift."""
    codes, head_dim, out = channels
    together, bits = BLOCKS_TOGETHER[n_rows], sum(part for part, _ in parts)
    words = [_quad_weights(b, b.add(weights, emit.I64(r * together * BLOCK))) for r in range(n_rows)]
    steps_and_shifts = [
        [emit.splat(b, emit.load(b, emit.F32, steps, 4 * r * together + i), LANES) for i in (0, TO_SHIFTS)]
        for r in range(n_rows)
    ]
    line_bytes, done = b.mul(head_dim, emit.I64(4)), emit.I64(0)
    ahead = b.mul(line_bytes, emit.I64(2 * bits * BLOCKS_AHEAD))
    for n_columns in COLUMNS[n_rows]:
        with emit.loop(b, done, head_dim, n_columns * LANES) as channel:
            start = b.add(codes, b.mul(channel.i, emit.I64(4)))
            sums = _emit_integer_sums(parts, b, start, line_bytes, ahead, n_columns, words)
            for r, (step, shift) in enumerate(steps_and_shifts):
                to = b.add(out, b.mul(b.add(b.mul(head_dim, emit.I64(r)), channel.i), emit.I64(4)))
                for c in range(n_columns):
                    so_far = b.fadd(emit.load(b, FLOATS, to, 4 * LANES * c), shift)
                    so_far = emit.multiply_add(b, b.sitofp(sums[r][c], FLOATS), step, so_far)
                    emit.store(b, so_far, to, 4 * LANES * c)
        if n_columns > 1:
            done = b.sub(head_dim, b.srem(head_dim, emit.I64(n_columns * LANES)))


def _quad_weights(b: Any, weights: Value) -> Callable[[int], Value]:
    """quad -> its four weights in every lane; weights: BLOCK bytes."""
    if emit.IS_ARM:  # products take a lane of a register
        four = emit.vector(emit.I32, 4)
        registers = [emit.load(b, four, weights, 16 * j) for j in range(BLOCK // 16)]
        return lambda quad: emit.lanes(b, registers[quad // 4], [quad % 4] * LANES)
    return lambda quad: emit.splat(b, emit.load(b, emit.I32, weights, 4 * quad), LANES)


def _emit_integer_sums(
    parts: Parts,
    b: Any,
    start: Value,
    line_bytes: Value,
    ahead: Value,
    n_columns: int,
    words: list[Callable[[int], Value]],
) -> list[list[Value]]:
    """sums[r][c] (LANES int32) of the weights of row r, words[r](quad), times the codes of column c.

    start: of the first column in the block's first line; ahead: bytes to what is fetched.
    """
    n_rows, zero = len(words), emit.constant(INTS, 0)
    low = [[zero] * n_columns for _ in range(n_rows)]
    high = [[zero] * n_columns for _ in range(n_rows)]  # of codes that stay where they lie, times 2 ** part
    for part, first_line in parts:
        if first_line:
            low = [[b.shl(x, emit.constant(INTS, 1)) for x in row] for row in low]
        in_place = part < 4 and not (emit.IS_ARM and n_rows == 4)  # every second code of a byte is
        for line in range(2 * part):
            address = b.add(start, b.mul(line_bytes, emit.I64(first_line + line)))
            emit.prefetch(b, b.add(address, ahead), 4 * LANES * n_columns)
            packed = [emit.load(b, INTS, address, 4 * LANES * c) for c in range(n_columns)]
            for i in range(8 // part):  # codes of a byte, the lowest first
                above = part if in_place and i % 2 else 0  # bits that stay below the code
                shift, mask = i * part - above, ((1 << part) - 1 << above) * 0x01010101
                codes = [
                    b.and_(
                        b.lshr(x, emit.constant(INTS, shift)) if shift else x,
                        emit.constant(INTS, mask),
                    )
                    for x in packed
                ]
                sums = high if above else low
                for r in range(n_rows):
                    word = words[r](line + i * 2 * part)
                    sums[r] = [products(b, word, code, x) for code, x in zip(codes, sums[r], strict=True)]
    if high[0][0] is zero:
        return low
    places = parts[-1][0] if len(parts) == 1 else 1
    return [
        [b.add(x, b.lshr(y, emit.constant(INTS, places))) for x, y in zip(*pair, strict=True)]
        for pair in zip(low, high, strict=True)
    ]


# Behind that in scratch: copies of scales, float16, and of p, float32, of what is no whole block.
SCALES_AT = SUMS_SCRATCH
P_AT = SCALES_AT + 2 * BLOCK
SCRATCH = P_AT + 4 * ROWS * BLOCK


BLOCKS_OF_1_ROW, BLOCKS_OF_2_ROWS, BLOCKS_OF_4_ROWS = (BLOCKS_TOGETHER[n] for n in ROW_COUNTS)


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
    """`emit_add_blocks` for bits of `PARTS` and rows of ROW_COUNTS."""

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
                write = functools.partial(emit_add_blocks, parts, n_rows)
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


VALUES = CodecKernels(
    _store_numbers, add=_add, finish=_finish, scratch=lambda codec, rows: SCRATCH, at_once=AT_ONCE
)


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
