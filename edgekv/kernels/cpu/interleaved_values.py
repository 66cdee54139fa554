"""Values in 1 to 4 bits, four tokens side by side, summed with 8-bit weights in integer dot products."""

import functools
from typing import Any, NamedTuple

import numpy as np
from numba import types

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.cpu import arm, block_weights, dot, emit
from edgekv.kernels.cpu.block_weights import ROUND, copy_floats, copy_halves
from edgekv.kernels.cpu.jit import fast_jit, intrinsic
from edgekv.kernels.cpu.loops import Loops, add_loop, address_of, chars, finish_loop, floats, numbers
from edgekv.kernels.cpu.rotate import rotate_back_row, rotation_numbers
from edgekv.kernels.cpu.scalar import get, put
from edgekv.kernels.cpu.simd import LANES
from edgekv.types import F32

ROWS = 4  # that share each unpacked code
# In a loop's scratch: each row's weights in bytes, its (size, shift), and a copy of what is no whole block.
SIZES_AT = ROWS * BLOCK
PART_AT = SIZES_AT + 8 * ROWS
SCRATCH = PART_AT + 6 * BLOCK
BLOCKS_AHEAD = 4
TOP_WEIGHT = 255
ROUND_BITS = int(np.float32(ROUND).view(np.int32))
TWO = np.float32(2)
ROW_COUNTS = 1, 2, 4
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
def _round_weights(context: Any, p: Any, scale: Any, middle: Any, whole: Any, sizes: Any) -> Any:
    """whole = p * scale of a block's tokens as bytes; to sizes, what they stand for.

    sizes[0]: the size of 1, sizes[1]: what the sum of (code - middle) has beyond that of the codes.
    """

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        p, scale, middle, whole, sizes = args
        weights, size = block_weights.rounded(b, block_weights.scaled(b, p, scale), TOP_WEIGHT)
        block_weights.store_bytes(b, weights, 0, whole)
        total = emit.total(b, emit.tree(b, type(b).add, [b.bitcast(x, block_weights.INTS) for x in weights]))
        total = b.sub(total, emit.I32(BLOCK * ROUND_BITS & 0xFFFFFFFF))
        shift = b.fmul(b.fmul(size, middle), b.sitofp(total, emit.F32))
        emit.store(b, size, sizes)
        emit.store(b, b.fneg(shift), sizes, 4)
        return context.get_dummy_value()

    return types.none(types.intp, types.intp, types.float32, types.intp, types.intp), build


@intrinsic
def _add_columns(context: Any, bits: Any, rows: Any, whole: Any, codes: Any, head_dim: Any, out: Any) -> Any:
    """out (rows, head_dim) += size * (weights times the block's codes) + shift, rows at most ROWS.

    Channels behind the last whole vector are left out.
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
                emit.call_own(
                    b, f"add_columns_{n_bits}_{n_rows}", functools.partial(_emit_columns, n_bits, n_rows), *rest
                )
                b.branch(end)
        b.position_at_end(end)
        return context.get_dummy_value()

    return types.none(*[types.intp] * 6), build


def _emit_columns(bits: int, n_rows: int, b: Any, whole: Any, codes: Any, head_dim: Any, out: Any) -> None:
    words = [_load_words(b, b.add(whole, emit.I64(r * BLOCK))) for r in range(n_rows)]
    sizes = [
        [emit.splat(b, emit.load(b, emit.F32, whole, SIZES_AT + 8 * r + i), LANES) for i in (0, 4)]
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
                size, shift = sizes[r]
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
    if arm.IS_ARM:  # products take a lane of a register
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
def _add_block(store: int, p: int, gap: int, rows: int, g: int, t: int, n: int, out: int, scratch: int) -> None:
    x = numbers(store)
    bits, head_dim, i = get(numbers(get(x, AT.bits)), g), get(x, AT.head_dim), t % BLOCK
    scale = get(x, AT.scale) + 2 * (g * get(x, AT.capacity) + t - i)
    first = get(numbers(get(x, AT.first_plane)), g) * get(x, AT.n_blocks)
    codes = get(x, AT.codes) + (first + t // BLOCK * bits) * 8 * head_dim
    middle = np.float32((1 << bits) - 1) / TWO
    if n < BLOCK:
        part = scratch + PART_AT + 4 * BLOCK
        copy_halves(scale + 2 * i, i, n, part)
        scale = part
    m = 0
    while m < rows:
        together = 4 if rows - m >= 4 else 2 if rows - m >= 2 else 1
        for r in range(together):
            row = p + 4 * gap * (m + r)
            if n < BLOCK:
                copy_floats(row, i, n, scratch + PART_AT)
                row = scratch + PART_AT
            _round_weights(row, scale, middle, scratch + r * BLOCK, scratch + SIZES_AT + 8 * r)
        target = out + 4 * m * head_dim
        _add_columns(bits, together, scratch, codes, head_dim, target)
        for d in range(head_dim // LANES * LANES, head_dim):
            for r in range(together):
                _add_channel(bits, scratch, r, codes + 4 * d, head_dim, floats(target), r * head_dim + d)
        m += together


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


LOOPS = {"interleaved": Loops(_store_numbers, add=_add_block, finish=_finish, scratch=lambda codec, rows: SCRATCH)}


@fast_jit
def _add_channel(bits: int, scratch: int, r: int, codes: int, head_dim: int, out: F32, target: int) -> None:
    """`_add_columns` for one channel of row r, of any head_dim."""
    packed, whole, sizes = chars(codes), chars(scratch + r * BLOCK), floats(scratch + SIZES_AT + 8 * r)
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
    put(out, target, get(out, target) + get(sizes, 0) * np.float32(total) + get(sizes, 1))
