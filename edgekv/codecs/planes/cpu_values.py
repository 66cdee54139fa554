"""Sums of values on a CPU: rows of weights times blocks of codes of 1 to 4 bits, in integer dot products.

`edgekv.codecs.planes` draws a block and defines its words: quad, field, line. A row m is one query's probabilities
p. A block adds to a channel d of the row's sums, `InterleavedValues.sums` in NumPy,

    out[m, d] += step[m] * (sum over tokens t of weight[m, t] * code[t, d] - middle * sum over t of weight[m, t])

where weight = p * scale / step, rounded to bytes, step = (the block's largest p * scale) / 255 and middle is what
codes have for 0. Rows share what is unpacked of codes. A column is as many channels as a vector has lanes. Tokens
that are no whole block are copied to scratch first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.core import cgutils

from edgekv.codecs.planes import FIELDS, MAX_WEIGHT, MIDDLE_CODE, MIN_WEIGHT
from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.compile import Scalar, intrinsic, jit
from edgekv.kernels.cpu.emit import LANES, Value, at
from edgekv.kernels.cpu.loops import (
    TOKENS_PER_CALL,
    CpuCodec,
    Loop,
    add_loop,
    address_of,
    call,
    finish_loop,
    floats,
    halves,
    int64s,
)
from edgekv.kernels.cpu.rope import rotate_back_row, rotation_args
from edgekv.kernels.cpu.scalar import ROUND, get, put, widen
from edgekv.kernels.interface import BLOCK
from edgekv.types import F32, U16

ROW_COUNTS = 4, 2, 1  # rows that are summed together: fours while there are, then a pair, then one
MAX_ROWS = max(ROW_COUNTS)
PREFETCH_BLOCKS = 4  # whose codes are fetched
# By the rows that are summed together: rows and blocks whose weights are rounded together. Four share their ways
# across lanes, where registers hold them.
WEIGHT_ROWS = {n: n if emit.REGISTER == 16 else 1 for n in ROW_COUNTS}
WEIGHT_BLOCKS = {n: MAX_ROWS // n if emit.REGISTER == 16 else 1 for n in ROW_COUNTS}
# By the rows, columns at a time: as many sums as hide a product's latency, and fit the registers.
COLUMNS_AT_ONCE = {
    1: (2, 1) if emit.IS_ARM else (4, 1),
    2: (2, 1),
    4: (1,) if emit.IS_ARM or emit.FEW_REGISTERS else (2, 1),
}
# A loop's scratch: weights uint8 [row][block][BLOCK]; float32 steps [row][block], then as many shifts; copies of
# float16 scales and of probabilities, float32 [row], of tokens that are no whole block.
STEPS_AT = MAX_ROWS * BLOCK
TO_SHIFTS = 4 * MAX_ROWS  # bytes from a step to its shift
SCALES_AT = STEPS_AT + 2 * TO_SHIFTS
P_AT = SCALES_AT + 2 * BLOCK
SCRATCH = P_AT + 4 * MAX_ROWS * BLOCK
ZERO, ONE, NO_SCALE = np.float32(0), np.float32(1), np.uint16(0)
ROUND_BITS = int(ROUND.view(np.int32))
WEIGHT_LANES = 16
WEIGHTS, WEIGHT_INTS, WEIGHT_HALVES, WEIGHT_BYTES = (
    emit.vector(kind, WEIGHT_LANES) for kind in (emit.F32, emit.I32, emit.I16, emit.I8)
)
INTS, FLOATS = emit.vector(emit.I32, LANES), emit.vector(emit.F32, LANES)


class Tokens(NamedTuple):
    """Blocks of tokens inside a kernel: the first token's probability and scale, and how many blocks there are."""

    p: Value  # float32
    stride: Value  # float32s from a row's to the next row's
    scale: Value  # float16
    n_blocks: Value


class Channels(NamedTuple):
    """Codes of blocks inside a kernel, and the sums that they are added to: addresses, and channels of a token."""

    codes: Value
    head_dim: Value
    out: Value  # (rows, head_dim) float32


def _emit_weights(
    n_rows: int, n_blocks: int, b: Any, tokens: Tokens, middle: Value, weights: Value, steps: Value
) -> None:
    """weights (n_rows, n_blocks, BLOCK) uint8, steps (n_rows, n_blocks) = p * scale of blocks, rounded.

    TO_SHIFTS bytes behind each step its shift, -step * middle * sum(weights). Of missing blocks the last one is
    taken. n_rows * n_blocks is 1 or 4.
    """
    blocks = [emit.I64(i) for i in range(n_blocks)]
    if n_blocks > 1:
        last = b.sub(tokens.n_blocks, emit.I64(1))
        blocks = [emit.min_int(b, i, last) for i in blocks]
    scaled = [
        _emit_scaled(
            b, at(b, tokens.p, (tokens.stride, 4 * m), (block, 4 * BLOCK)), at(b, tokens.scale, (block, 2 * BLOCK))
        )
        for m in range(n_rows)
        for block in blocks
    ]
    top = emit.reduce_lanes(b, emit.maximum, [emit.reduce(b, emit.maximum, parts) for parts in scaled])
    least, most, inverse = (
        emit.constant(top.type, np.float32(x)) for x in (MIN_WEIGHT, MAX_WEIGHT, ONE / MAX_WEIGHT)
    )
    factors = b.fdiv(most, emit.maximum(b, top, least))
    # Flags of its own: else LLVM multiplies inverse and middle first, and rounds otherwise.
    step, sums = b.fmul(top, inverse, flags=emit.CONTRACT), []
    for i, parts in enumerate(scaled):
        if len(scaled) == 1:
            factor = emit.splat(b, factors, WEIGHT_LANES)
        else:
            factor = emit.shuffle(b, factors, [i] * WEIGHT_LANES)
        round_ = emit.constant(WEIGHTS, ROUND)
        shifted = [b.bitcast(emit.multiply_add(b, vector, factor, round_), WEIGHT_INTS) for vector in parts]
        for j, vector in enumerate(shifted):  # ROUND's lowest byte is 0
            emit.store(b, b.trunc(vector, WEIGHT_BYTES), weights, BLOCK * i + WEIGHT_LANES * j)
        sums.append(emit.reduce(b, emit.add, shifted))
    total = emit.reduce_lanes(b, emit.add, sums)
    total = b.sub(total, emit.constant(total.type, BLOCK * ROUND_BITS & 0xFFFFFFFF))
    middles = middle if len(scaled) == 1 else emit.splat(b, middle, len(scaled))
    shift = b.fmul(b.fmul(step, middles, flags=emit.CONTRACT), b.sitofp(total, step.type))
    emit.store(b, step, steps)
    emit.store(b, b.fneg(shift), steps, TO_SHIFTS)


def _emit_scaled(b: Any, p: Value, scale: Value) -> list[Value]:
    """Returns p * scale of a block's tokens: BLOCK float32 in vectors of WEIGHT_LANES."""
    parts = range(0, BLOCK, WEIGHT_LANES)
    weights = (emit.load(b, WEIGHTS, p, 4 * t) for t in parts)
    scales = (widen(b, emit.load(b, WEIGHT_HALVES, scale, 2 * t)) for t in parts)
    return [b.fmul(weight, width) for weight, width in zip(weights, scales, strict=True)]


def _emit_sums(bits: int, n_rows: int, b: Any, tokens: Tokens, channels: Channels, scratch: Value) -> None:
    """out (n_rows, head_dim) += p * scale times (codes - their middle) of all blocks of tokens."""
    together, n_weight_rows = WEIGHT_BLOCKS[n_rows], WEIGHT_ROWS[n_rows]
    with emit.loop(b, 0, at(b, tokens.n_blocks, together - 1), together) as first:
        n_blocks = emit.min_int(b, b.sub(tokens.n_blocks, first.i), together)
        scale = at(b, tokens.scale, (first.i, 2 * BLOCK))
        for m in range(0, n_rows, n_weight_rows):
            p = at(b, tokens.p, (first.i, 4 * BLOCK), (tokens.stride, 4 * m))
            chunk = Tokens(p, tokens.stride, scale, n_blocks)
            targets = at(b, scratch, m * BLOCK), at(b, scratch, STEPS_AT + 4 * m)
            write = functools.partial(_emit_weights, n_weight_rows, together)
            emit.call_internal(
                b, f"round_weights_{n_weight_rows}", write, chunk, emit.F32(float(MIDDLE_CODE[bits])), *targets
            )
        with emit.loop(b, 0, n_blocks, 1) as block:
            weights, steps = at(b, scratch, (block.i, BLOCK)), at(b, scratch, STEPS_AT, (block.i, 4))
            codes = at(b, channels.codes, (b.add(first.i, block.i), channels.head_dim, 8 * bits))
            write = functools.partial(_emit_block_sums, bits, n_rows)
            of_block = Channels(codes, channels.head_dim, channels.out)
            emit.call_internal(b, f"add_columns_{bits}_{n_rows}", write, weights, steps, of_block)
            n_left = b.srem(channels.head_dim, emit.I64(LANES))
            with b.if_then(b.icmp_signed(">", n_left, emit.I64(0))):
                left_at = b.mul(b.sub(channels.head_dim, n_left), emit.I64(4))
                line_bytes = b.mul(channels.head_dim, emit.I64(4))
                for m in range(n_rows):
                    row = at(b, weights, m * together * BLOCK), at(b, steps, 4 * m * together)
                    target = at(b, channels.out, (line_bytes, m), left_at)
                    write = functools.partial(_emit_last_channels, bits)
                    last = at(b, codes, left_at), line_bytes, target, n_left
                    emit.call_internal(b, f"add_last_channels_{bits}", write, *row, *last)


def _emit_block_sums(bits: int, n_rows: int, b: Any, weights: Value, steps: Value, channels: Channels) -> None:
    """out (n_rows, head_dim) += step * (weights times the block's codes) + shift, for whole columns."""
    codes, head_dim, out = channels
    stride = WEIGHT_BLOCKS[n_rows]  # from a row's weights and step to the next row's
    rows = [_load_row(b, at(b, weights, m * stride * BLOCK), at(b, steps, 4 * m * stride)) for m in range(n_rows)]
    line_bytes, done = b.mul(head_dim, emit.I64(4)), emit.I64(0)
    for n_columns in COLUMNS_AT_ONCE[n_rows]:
        with emit.loop(b, done, head_dim, n_columns * LANES) as channel:
            targets = [at(b, out, (b.add(b.mul(head_dim, emit.I64(m)), channel.i), 4)) for m in range(n_rows)]
            _emit_columns(bits, n_columns, b, rows, at(b, codes, (channel.i, 4)), line_bytes, targets, None)
        if n_columns > 1:
            done = b.sub(head_dim, b.srem(head_dim, emit.I64(n_columns * LANES)))


def _emit_last_channels(
    bits: int, b: Any, weights: Value, step: Value, codes: Value, line_bytes: Value, out: Value, n: Value
) -> None:
    """`_emit_block_sums` of one row for the n channels behind the last whole column."""
    _emit_columns(bits, 1, b, [_load_row(b, weights, step)], codes, line_bytes, [out], n)


class Row(NamedTuple):
    """A row's rounded weights of a block inside a kernel."""

    weights: Callable[[int], Value]  # (quad): its four bytes, in every lane
    step: Value  # float32 in every lane, as the shift
    shift: Value


def _load_row(b: Any, weights: Value, step: Value) -> Row:
    """Returns a row whose weights (BLOCK bytes) and step are at these addresses."""
    step, shift = (emit.splat(b, emit.load(b, emit.F32, step, offset), LANES) for offset in (0, TO_SHIFTS))
    if emit.IS_ARM:  # products take a lane of a register
        four = emit.vector(emit.I32, 4)
        registers = [emit.load(b, four, weights, 16 * j) for j in range(BLOCK // 16)]
        return Row(lambda quad: emit.shuffle(b, registers[quad // 4], [quad % 4] * LANES), step, shift)
    return Row(lambda quad: emit.splat(b, emit.load(b, emit.I32, weights, 4 * quad), LANES), step, shift)


def _emit_columns(
    bits: int,
    n_columns: int,
    b: Any,
    rows: list[Row],
    codes: Value,
    line_bytes: Value,
    targets: list[Value],
    n_channels: Value | None,
) -> None:
    """targets[m] (n_columns * LANES,) float32 += step * (weights times codes) + shift, of each row m.

    codes: of the first column in the block's first line. n_channels: of a single column, None for all.
    """
    sums = _emit_integer_sums(bits, n_columns, b, rows, codes, line_bytes, n_channels)
    for row, target, totals in zip(rows, targets, sums, strict=True):
        for c, total in enumerate(totals):
            acc = b.fadd(emit.masked_load(b, FLOATS, target, 4 * LANES * c, n_channels), row.shift)
            acc = emit.multiply_add(b, b.sitofp(total, FLOATS), row.step, acc)
            emit.masked_store(b, acc, target, 4 * LANES * c, n_channels)


def _emit_integer_sums(
    bits: int, n_columns: int, b: Any, rows: list[Row], start: Value, line_bytes: Value, n_channels: Value | None
) -> list[list[Value]]:
    """Returns sums[m][c], LANES int32: over a block's tokens, weights of row m times codes of column c."""
    zero = emit.constant(INTS, 0)
    low = [[zero] * n_columns for _ in rows]
    high = [[zero] * n_columns for _ in rows]  # of codes that are not shifted down: 2 ** field times too large
    ahead, first_line = b.mul(line_bytes, emit.I64(2 * bits * PREFETCH_BLOCKS)), 0
    for field in FIELDS[bits]:
        if first_line:
            low = [[b.shl(x, emit.constant(INTS, 1)) for x in row] for row in low]
        # Where registers suffice, every second code of a byte is not shifted.
        in_place = field < 4 and not (emit.IS_ARM and len(rows) == 4)
        for line in range(2 * field):
            address = at(b, start, (line_bytes, first_line + line))
            emit.prefetch(b, b.add(address, ahead), 4 * LANES * n_columns)
            packed = [emit.masked_load(b, INTS, address, 4 * LANES * c, n_channels) for c in range(n_columns)]
            for i in range(8 // field):  # codes of a byte, the lowest first
                above = field if in_place and i % 2 else 0  # bits that stay below the code
                shift, mask = i * field - above, ((1 << field) - 1 << above) * 0x01010101
                shifted = [b.lshr(x, emit.constant(INTS, shift)) if shift else x for x in packed]
                codes = [b.and_(x, emit.constant(INTS, mask)) for x in shifted]
                sums = high if above else low
                for m, row in enumerate(rows):
                    weights = row.weights(line + i * 2 * field)
                    sums[m] = [
                        emit.add_products(b, weights, code, x, "u") for code, x in zip(codes, sums[m], strict=True)
                    ]
        first_line += 2 * field
    if high[0][0] is zero:
        return low
    field_bits = emit.constant(INTS, FIELDS[bits][-1])
    return [
        [b.add(x, b.lshr(y, field_bits)) for x, y in zip(*pair, strict=True)]
        for pair in zip(low, high, strict=True)
    ]


class ValueArgs(NamedTuple):
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
    add_1: int  # the address of `add_loop_of` a head's bits; 0 where no head has as many
    add_2: int
    add_3: int
    add_4: int


ARG = ValueArgs(*range(len(ValueArgs._fields)))  # where each stands


@intrinsic
def _add_blocks(context: Any, bits: Any, rows: Any, tokens: Any, channels: Any, scratch: Any) -> Any:
    """`_emit_sums` for a constant number of bits, rows of ROW_COUNTS, and the fields of `Tokens`, `Channels`."""
    if not isinstance(bits, types.IntegerLiteral):
        return None

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        _, rows, tokens, channels, scratch = args
        tokens, channels = Tokens(*cgutils.unpack_tuple(b, tokens)), Channels(*cgutils.unpack_tuple(b, channels))
        for n_rows in ROW_COUNTS:
            with b.if_then(b.icmp_signed("==", rows, emit.I64(n_rows))):
                write = functools.partial(_emit_sums, bits.literal_value, n_rows)
                emit.call_internal(b, f"add_blocks_{n_rows}", write, tokens, channels, scratch)
        return context.get_dummy_value()

    return types.none(bits, rows, tokens, channels, scratch), build


@functools.cache
def add_loop_of(bits: int) -> Loop:
    """Returns the loop that adds the tokens of a head whose values have so many bits."""

    def add(args: int, p: int, stride: int, rows: int, g: int, t: int, n: int, out: int, scratch: int) -> None:
        x = int64s(args)
        head_dim, scales = get(x, ARG.head_dim), get(x, ARG.scale) + 2 * g * get(x, ARG.capacity)
        done = 0
        while done < n:
            i = (t + done) % BLOCK
            n_tokens, scale = min(BLOCK - i, n - done), scales + 2 * (t + done - i)
            p_at, p_stride = p + 4 * done, stride
            if n_tokens < BLOCK:
                _copy_tokens(halves(scale + 2 * i), i, n_tokens, halves(scratch + SCALES_AT), NO_SCALE)
                scale = scratch + SCALES_AT
            else:  # all whole blocks at once
                n_tokens = (n - done) // BLOCK * BLOCK
            line = get(int64s(get(x, ARG.first_plane)), g) * get(x, ARG.n_blocks) + (t + done) // BLOCK * bits
            codes, m = get(x, ARG.codes) + 8 * head_dim * line, 0
            while m < rows:
                n_rows = 4 if rows - m >= 4 else 2 if rows - m >= 2 else 1
                row_p, target = p_at + 4 * stride * m, out + 4 * m * head_dim
                if n_tokens < BLOCK:
                    for r in range(n_rows):
                        copy = floats(scratch + P_AT + 4 * BLOCK * r)
                        _copy_tokens(floats(row_p + 4 * stride * r), i, n_tokens, copy, ZERO)
                    row_p, p_stride = scratch + P_AT, BLOCK
                tokens = row_p, p_stride, scale, max(n_tokens // BLOCK, 1)
                _add_blocks(bits, n_rows, tokens, (codes, head_dim, target), scratch)
                m += n_rows
            done += n_tokens

    return add_loop(add)


@add_loop
def _add(args: int, p: int, stride: int, rows: int, g: int, t: int, n: int, out: int, scratch: int) -> None:
    x = int64s(args)
    loop = get(x, ARG.add_1 - 1 + get(int64s(get(x, ARG.bits)), g))
    call(loop, (args, p, stride, rows, g, t, n, out, scratch))


@jit
def _copy_tokens(x: F32 | U16, i: int, n: int, y: F32 | U16, zero: Scalar) -> None:
    """y (BLOCK,) = n numbers x for the tokens i.. of a block, 0 for its others."""
    for k in range(BLOCK):
        put(y, k, zero)
    for k in range(n):
        put(y, i + k, get(x, k))


@finish_loop
def _finish(args: int, sums: int, out: int, rows: int) -> None:
    x = int64s(args)
    d, matrix, inverse = get(x, ARG.head_dim), floats(get(x, ARG.matrix)), floats(get(x, ARG.inverse))
    for m in range(rows):
        row = m * d
        rotate_back_row(floats(sums), row, d, matrix, inverse, get(x, ARG.is_hadamard), floats(out), row, d)


def _args(codec: Any) -> ValueArgs:
    a = codec.arrays
    return ValueArgs(
        **{name: address_of(a[name]) for name in ("codes", "scale")},
        **{name: address_of(getattr(codec, name)) for name in ("bits", "first_plane")},
        **{"capacity": codec.capacity, "n_blocks": a["codes"].shape[1], "head_dim": codec.head_dim},
        **{f"add_{bits}": add_loop_of(bits).address if bits in codec.bits else 0 for bits in FIELDS},
        **rotation_args(codec.rotation),
    )


VALUES = CpuCodec(_args, add=_add, finish=_finish, scratch=lambda codec, rows: SCRATCH, at_once=TOKENS_PER_CALL)
