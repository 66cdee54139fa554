"""Weights of a block of tokens, p * scale, rounded to integers: what products of bytes take, for sums over values.

p are probabilities, a row for each query; scale is one float16 of a token's value. A rounded weight stands for
itself times the step of its row and block.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import types

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.contract.planes import LEAST_WEIGHT
from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.compile import intrinsic
from edgekv.kernels.cpu.emit import Value
from edgekv.kernels.cpu.scalar import ROUND, widen

ROUND_BITS = int(ROUND.view(np.int32))
ROWS = 4  # at most, that share each unpacked code
TO_SHIFTS = 4 * ROWS  # bytes from a step to its shift: behind the steps of all rows
TOP_WEIGHT = 255  # the largest one that is rounded to a byte
LANES = 16
FLOATS, INTS, HALVES, BYTES = (emit.vector(kind, LANES) for kind in (emit.F32, emit.I32, emit.I16, emit.I8))


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
            for offset in range(0, n_bytes * BLOCK, LANES):
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
    """p * scale of a block's tokens: BLOCK float32 in vectors of LANES."""
    parts = range(0, BLOCK, LANES)
    weights = (emit.load(builder, FLOATS, p, 4 * t) for t in parts)
    scales = (widen(builder, emit.load(builder, HALVES, scale, 2 * t)) for t in parts)
    return [builder.fmul(weight, width) for weight, width in zip(weights, scales, strict=True)]


def all_rounded(builder: Any, blocks: list[list[Value]]) -> tuple[list[list[Value]], Value]:
    """Rounds the scaled weights of one block, or of four, to integers up to TOP_WEIGHT; also returns their step.

    The steps of four blocks are a vector.
    """
    top = emit.all_lanes(builder, emit.maximum, [emit.tree(builder, emit.maximum, x) for x in blocks])
    least, most = (emit.constant(top.type, np.float32(x)) for x in (LEAST_WEIGHT, TOP_WEIGHT))
    factors = builder.fdiv(most, emit.maximum(builder, top, least))
    shifted, round_ = [], emit.constant(FLOATS, ROUND)
    for i, weights in enumerate(blocks):
        if len(blocks) == 1:
            factor = emit.splat(builder, factors, LANES)
        else:
            factor = emit.lanes(builder, factors, [i] * LANES)
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
            emit.store(b, b.trunc(b.bitcast(part, INTS), BYTES), weights, BLOCK * i + LANES * j)
    sums = [emit.tree(b, emit.add, [b.bitcast(x, INTS) for x in block]) for block in shifted]
    total = emit.all_lanes(b, emit.add, sums)
    total = b.sub(total, emit.constant(total.type, BLOCK * ROUND_BITS & 0xFFFFFFFF))
    middles = middle if len(exact) == 1 else emit.splat(b, middle, len(exact))
    shift = b.fmul(b.fmul(step, middles), b.sitofp(total, step.type))
    emit.store(b, step, steps)
    emit.store(b, b.fneg(shift), steps, TO_SHIFTS)
