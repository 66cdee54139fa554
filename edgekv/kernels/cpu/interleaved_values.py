"""Values in 1 to 4 bits, four tokens side by side, summed with 8-bit weights in integer dot products."""

import functools
from typing import Any, NamedTuple

import numpy as np
from numba import types

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.cpu import arm, arm_values, block_weights, dot, emit
from edgekv.kernels.cpu.block_weights import MORE, ROWS, copy_floats, copy_halves
from edgekv.kernels.cpu.jit import fast_jit, intrinsic
from edgekv.kernels.cpu.loops import AT_ONCE, Loops, add_loop, address_of, chars, finish_loop, floats, numbers
from edgekv.kernels.cpu.rotate import rotate_back_row, rotation_numbers
from edgekv.kernels.cpu.scalar import get, put
from edgekv.kernels.cpu.simd import LANES
from edgekv.types import F32

ROW_COUNTS = 1, 2, 4
# By rows, blocks whose weights are rounded before they are used, and rows of which this is done at once: four
# rounded together share their ways across lanes, where registers hold them.
TOGETHER = {1: 4, 2: 2, 4: 1} if emit.REGISTER == 16 else {1: 1, 2: 1, 4: 1}
ROUNDED = {1: 1, 2: 2, 4: 4} if emit.REGISTER == 16 else {1: 1, 2: 1, 4: 1}
TOGETHER_1, TOGETHER_2 = TOGETHER[1], TOGETHER[2]
BY_LANES = arm.IS_ARM and arm.has_dot()  # whole blocks are added by `arm_values`, which see
# In a loop's scratch: weights in bytes, by row and block; their sizes, and MORE bytes behind these their shifts;
# copies of scales and of weights of what is no whole block.
WEIGHTS_AT, ROW_BYTES, SIZES_AT, PART_AT = 0, BLOCK, ROWS * BLOCK, ROWS * BLOCK + 2 * MORE
if BY_LANES:
    WEIGHTS_AT, ROW_BYTES, SIZES_AT, PART_AT = arm_values.WEIGHTS_AT, arm_values.ROW_BYTES, 0, arm_values.SCRATCH
ROWS_AT = PART_AT + 2 * BLOCK
SCRATCH = ROWS_AT + 4 * ROWS * BLOCK
BLOCKS_AHEAD = 4
# By rows, vectors of channels at a time: as many sums as hide a product's latency, and fit the registers.
COLUMNS = {1: (2, 1) if arm.IS_ARM else (4, 1), 2: (2, 1), 4: (1,) if arm.IS_ARM or emit.FEW_REGISTERS else (2, 1)}
# Bits of a code, in parts that divide a byte: (bits, rows of the store before it).
PARTS = {1: ((1, 0),), 2: ((2, 0),), 3: ((2, 0), (1, 4)), 4: ((4, 0),)}


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
    whole: Any,
) -> Any:
    """out (rows, head_dim) += p * scale times (codes - their middle) of n_blocks blocks, rows in ROW_COUNTS.

    Channels behind the last whole vector are left out. In whole remains what `round_blocks` put there last.
    """

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        bits, rows, *rest = args
        end = b.append_basic_block("end")
        cases = b.switch(b.add(b.mul(bits, emit.I64(8)), rows), end)
        for n_bits in PARTS:
            for n_rows in ROW_COUNTS:
                case = b.append_basic_block("case")
                cases.add_case(emit.I64(8 * n_bits + n_rows), case)
                b.position_at_end(case)
                write = functools.partial(_write_blocks, n_bits, n_rows)
                if BY_LANES:
                    write = functools.partial(arm_values.add_blocks, PARTS[n_bits], n_rows)
                emit.call_own(b, f"add_blocks_{n_bits}_{n_rows}", write, *rest)
                b.branch(end)
        b.position_at_end(end)
        return context.get_dummy_value()

    return types.none(*[types.intp] * 10), build


def _write_blocks(
    bits: int,
    n_rows: int,
    b: Any,
    p: Any,
    gap: Any,
    scale: Any,
    n_blocks: Any,
    codes: Any,
    head_dim: Any,
    out: Any,
    whole: Any,
) -> None:
    together, middle = TOGETHER[n_rows], emit.F32(((1 << bits) - 1) / 2)
    block_bytes = b.mul(head_dim, emit.I64(8 * bits))
    with emit.loop(b, emit.I64(0), b.add(n_blocks, emit.I64(together - 1)), together) as few:
        left = b.sub(n_blocks, few.i)
        here = b.select(b.icmp_signed("<", left, emit.I64(together)), left, emit.I64(together))
        first = b.add(p, b.mul(few.i, emit.I64(4 * BLOCK))), b.add(scale, b.mul(few.i, emit.I64(2 * BLOCK)))
        for row in range(0, n_rows, ROUNDED[n_rows]):
            own = b.add(first[0], b.mul(gap, emit.I64(4 * row)))
            rows = ROUNDED[n_rows]
            write = functools.partial(block_weights.round_blocks, rows, together)
            target = b.add(whole, emit.I64(row * BLOCK)), b.add(whole, emit.I64(SIZES_AT + 4 * row))
            emit.call_own(b, f"round_weights_{rows}", write, own, gap, first[1], here, middle, *target)
        with emit.loop(b, emit.I64(0), here, 1) as block:
            weights = b.add(whole, b.mul(block.i, emit.I64(BLOCK)))
            sizes = b.add(whole, b.add(emit.I64(SIZES_AT), b.mul(block.i, emit.I64(4))))
            place = b.add(codes, b.mul(b.add(few.i, block.i), block_bytes))
            write = functools.partial(_add_columns, bits, n_rows)
            emit.call_own(b, f"add_columns_{bits}_{n_rows}", write, weights, sizes, place, head_dim, out)


def _add_columns(
    bits: int, n_rows: int, b: Any, whole: Any, sizes: Any, codes: Any, head_dim: Any, out: Any
) -> None:
    """out (rows, head_dim) += size * (weights times the block's codes) + shift."""
    words = [_load_words(b, b.add(whole, emit.I64(r * TOGETHER[n_rows] * BLOCK))) for r in range(n_rows)]
    each = [
        [emit.splat(b, emit.load(b, emit.F32, sizes, 4 * r * TOGETHER[n_rows] + i), LANES) for i in (0, MORE)]
        for r in range(n_rows)
    ]
    row_bytes, done = b.mul(head_dim, emit.I64(4)), emit.I64(0)
    block_bytes = b.mul(row_bytes, emit.I64(2 * bits * BLOCKS_AHEAD))
    for n_columns in COLUMNS[n_rows]:
        with emit.loop(b, done, head_dim, n_columns * LANES) as turn:
            d = turn.i
            start = b.add(codes, b.mul(d, emit.I64(4)))
            sums = _sums(b, bits, start, row_bytes, block_bytes, n_rows, n_columns, words)
            for r in range(n_rows):
                size, shift = each[r]
                target = b.add(out, b.mul(b.add(b.mul(head_dim, emit.I64(r)), d), emit.I64(4)))
                for c in range(n_columns):
                    kind = emit.vector(emit.F32, LANES)
                    so_far = b.fadd(emit.load(b, kind, target, 4 * LANES * c), shift)
                    so_far = emit.multiply_add(b, b.sitofp(sums[r][c], kind), size, so_far)
                    emit.store(b, so_far, target, 4 * LANES * c)
        if n_columns > 1:
            done = b.sub(head_dim, b.srem(head_dim, emit.I64(n_columns * LANES)))


def _load_words(b: Any, whole: Any) -> Any:
    """quad -> its four weights in every lane."""
    if arm.IS_ARM:  # fewer registers than words
        four = emit.vector(emit.I32, 4)
        registers = [emit.load(b, four, whole, 16 * j) for j in range(BLOCK // 16)]
        return lambda quad: emit.lanes(b, registers[quad // 4], [quad % 4] * LANES)
    return lambda quad: emit.splat(b, emit.load(b, emit.I32, whole, 4 * quad), LANES)


def _sums(
    b: Any, bits: int, start: Any, row_bytes: Any, ahead: Any, n_rows: int, n_columns: int, words: Any
) -> Any:
    """sums[r][c] of the weights of row r times the codes of column c."""
    zero = emit.constant(dot.INTS, 0)
    low = [[zero] * n_columns for _ in range(n_rows)]
    high = [[zero] * n_columns for _ in range(n_rows)]  # of codes that stay where they lie, times 2 ** part
    for part, first in PARTS[bits]:
        if first:
            low = [[b.shl(x, emit.constant(dot.INTS, 1)) for x in row] for row in low]
        two = part < 4 and not (arm.IS_ARM and n_rows == 4)
        for q in range(2 * part):
            address = b.add(start, b.mul(row_bytes, emit.I64(first + q)))
            emit.prefetch(b, b.add(address, ahead), 4 * LANES * n_columns)
            packed = [emit.load(b, dot.INTS, address, 4 * LANES * c) for c in range(n_columns)]
            for field in range(8 // part):
                above = part if two and field % 2 else 0
                shift, mask = field * part - above, ((1 << part) - 1 << above) * 0x01010101
                codes = [
                    b.and_(
                        b.lshr(x, emit.constant(dot.INTS, shift)) if shift else x, emit.constant(dot.INTS, mask)
                    )
                    for x in packed
                ]
                sums = high if above else low
                for r in range(n_rows):
                    word = words[r](q + field * 2 * part)
                    sums[r] = [dot.products(b, word, code, x) for code, x in zip(codes, sums[r], strict=True)]
    if high[0][0] is zero:
        return low
    places = PARTS[bits][-1][0] if len(PARTS[bits]) == 1 else 1
    return [
        [b.add(x, b.lshr(y, emit.constant(dot.INTS, places))) for x, y in zip(*pair, strict=True)]
        for pair in zip(low, high, strict=True)
    ]


@add_loop
def _add(store: int, p: int, gap: int, rows: int, g: int, t: int, n: int, out: int, scratch: int) -> None:
    x = numbers(store)
    bits, head_dim, first = get(numbers(get(x, AT.bits)), g), get(x, AT.head_dim), get(x, AT.scale)
    first += 2 * g * get(x, AT.capacity)
    whole_only, done = head_dim % LANES == 0, 0
    while done < n:
        i = (t + done) % BLOCK
        few, row, row_gap, scale = min(BLOCK - i, n - done), p + 4 * done, gap, first + 2 * (t + done - i)
        if few < BLOCK:
            copy_halves(scale + 2 * i, i, few, scratch + PART_AT)
            scale = scratch + PART_AT
        elif whole_only:
            few = (n - done) // BLOCK * BLOCK
        plane = get(numbers(get(x, AT.first_plane)), g) * get(x, AT.n_blocks) + (t + done) // BLOCK * bits
        codes, m = get(x, AT.codes) + 8 * head_dim * plane, 0
        while m < rows:
            together = 4 if rows - m >= 4 else 2 if rows - m >= 2 else 1
            own, target = row + 4 * gap * m, out + 4 * m * head_dim
            if few < BLOCK:
                for r in range(together):
                    copy_floats(own + 4 * gap * r, i, few, scratch + ROWS_AT + 4 * BLOCK * r)
                own, row_gap = scratch + ROWS_AT, BLOCK
            n_blocks = max(few // BLOCK, 1)
            _add_blocks(bits, together, own, row_gap, scale, n_blocks, codes, head_dim, target, scratch)
            for d in range(head_dim // LANES * LANES, head_dim):
                for r in range(together):
                    _add_channel(
                        bits, scratch, r, together, codes + 4 * d, head_dim, floats(target), r * head_dim + d
                    )
            m += together
        done += few


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


LOOPS = {
    "interleaved": Loops(
        _store_numbers, add=_add, finish=_finish, scratch=lambda codec, rows: SCRATCH, at_once=AT_ONCE
    )
}


@fast_jit
def _add_channel(
    bits: int, scratch: int, r: int, rows: int, codes: int, head_dim: int, out: F32, target: int
) -> None:
    """`_add_columns` for one channel of row r of `rows`, of any head_dim."""
    place = r * (TOGETHER_1 if rows == 1 else TOGETHER_2 if rows == 2 else 1)
    packed, sizes = chars(codes), floats(scratch + SIZES_AT + 4 * place)
    whole = chars(scratch + WEIGHTS_AT + place * ROW_BYTES)
    part, worth = (2, 2) if bits == 3 else (bits, 1)
    row = total = 0
    while row < 2 * bits:
        for q in range(2 * part):
            for i in range(4):
                byte = np.int64(get(packed, (row + q) * 4 * head_dim + i))
                for field in range(8 // part):
                    weight = np.int64(get(whole, 4 * (q + field * 2 * part) + i))
                    total += worth * weight * (byte >> field * part & (1 << part) - 1)
        row, part, worth = row + 2 * part, 1, 1
    put(out, target, get(out, target) + get(sizes, 0) * np.float32(total) + get(sizes, ROWS))
