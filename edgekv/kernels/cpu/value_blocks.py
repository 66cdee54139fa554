"""Sums over blocks of values in 1 to 4 bits, in integer dot products with weights of 8 bits.

Words are those of `interleaved_values`. `arm_values` does the same on an Arm with dot products, and has the same
names for what `interleaved_values` takes of either.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.cpu import arm, emit
from edgekv.kernels.cpu.block_weights import ROWS, TO_SHIFTS, TokensAt, round_blocks
from edgekv.kernels.cpu.byte_products import INTS, products
from edgekv.kernels.cpu.emit import Value
from edgekv.kernels.cpu.simd import LANES

Parts = tuple[tuple[int, int], ...]  # of a code: (bits, lines of a block before it)

# By rows, blocks whose weights are rounded before they are used, and rows of which this is done at once: four
# rounded together share their ways across lanes, where registers hold them.
BLOCKS_TOGETHER = {1: 4, 2: 2, 4: 1} if emit.REGISTER == 16 else {1: 1, 2: 1, 4: 1}
ROWS_TOGETHER = {1: 1, 2: 2, 4: 4} if emit.REGISTER == 16 else {1: 1, 2: 1, 4: 1}
# In a loop's scratch: bytes before the rounded weights [row][block], of a block of them, and before their steps,
# [row][block] float32 with shifts TO_SHIFTS bytes behind; bytes in all.
WEIGHTS_AT, WEIGHTS_BYTES, STEPS_AT = 0, BLOCK, ROWS * BLOCK
SCRATCH = STEPS_AT + 2 * TO_SHIFTS
BLOCKS_AHEAD = 4  # whose codes are fetched
# By rows, columns at a time: as many sums as hide a product's latency, and fit the registers.
COLUMNS = {1: (2, 1) if arm.IS_ARM else (4, 1), 2: (2, 1), 4: (1,) if arm.IS_ARM or emit.FEW_REGISTERS else (2, 1)}
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
    if arm.IS_ARM:  # products take a lane of a register
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
        in_place = part < 4 and not (arm.IS_ARM and n_rows == 4)  # every second code of a byte is
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
