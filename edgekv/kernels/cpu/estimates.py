"""What scores around a centre are likely to be, for 16 tokens at once: read of all of them before a scan."""

import functools
from typing import Any

from numba import types

from edgekv.kernels.contract.planes import REACH
from edgekv.kernels.cpu import centre_products, emit
from edgekv.kernels.cpu.half import widen
from edgekv.kernels.cpu.jit import intrinsic
from edgekv.kernels.cpu.scan import ROW_COUNTS

NEAR = centre_products.NEAR
PER_BLOCK = 2 * NEAR
"""Numbers of a row and a block: of each centre's tokens the estimate, then the score that they hardly exceed."""

Value = Any  # an llvmlite value
FOUR = emit.vector(emit.F32, NEAR)


@intrinsic
def estimate_blocks(
    context: Any,
    words: Any,
    sizes: Any,
    lengths: Any,
    rows: Any,
    width: Any,
    centres: Any,
    steps: Any,
    deviations: Any,
    n_blocks: Any,
    s: Any,
    gap: Any,
    near: Any,
) -> Any:
    """s[m * gap + PER_BLOCK * block:] = row m's estimates of n_blocks blocks, each before its reach.

    Addresses of what `centre_products` wants of queries, their sizes, and their lengths; of the first block's
    centres, their steps and deviations. near: room of `centre_products.SCRATCH` bytes.
    """

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        words, sizes, lengths, rows, width, *stored, s, gap, near = args
        done = emit.I64(0)
        for together in ROW_COUNTS:
            with emit.loop(b, done, rows, together) as turn:
                own = (
                    b.add(words, b.mul(turn.i, b.mul(width, emit.I64(2)))),
                    b.add(sizes, b.mul(turn.i, emit.I64(8))),
                    b.add(lengths, b.mul(turn.i, emit.I64(4))),
                )
                target = b.add(s, b.mul(turn.i, b.mul(gap, emit.I64(4))))
                write = functools.partial(_estimate_rows, together)
                emit.call_own(b, f"estimate_{together}", write, *own, width, *stored, target, gap, near)
            done = turn.i
        return context.get_dummy_value()

    return types.none(*[types.intp] * 12), build


def _estimate_rows(
    n_rows: int,
    b: Any,
    words: Value,
    sizes: Value,
    lengths: Value,
    width: Value,
    centres: Value,
    steps: Value,
    deviations: Value,
    n_blocks: Value,
    s: Value,
    gap: Value,
    near: Value,
) -> None:
    each = [emit.splat(b, emit.load(b, emit.F32, lengths, 4 * r), NEAR) for r in range(n_rows)]
    targets = [b.add(s, b.mul(gap, emit.I64(4 * r))) for r in range(n_rows)]

    def write(block: Value, at: Value) -> None:
        place = b.add(deviations, b.mul(block, emit.I64(2 * NEAR)))
        stored = widen(b, emit.load(b, emit.vector(emit.I16, NEAR), place))
        for r in range(n_rows):
            deviation, score = (
                b.fmul(stored, each[r]),
                emit.load(b, FOUR, at, centre_products.row_bytes(n_rows) * r),
            )
            square, times = b.fmul(deviation, deviation), b.fmul(deviation, emit.constant(FOUR, REACH))
            half = b.fmul(square, emit.constant(FOUR, 0.5))
            added = b.select(b.fcmp_ordered("<", half, times), half, times)
            both = [b.fadd(score, added), b.fadd(score, emit.maximum(b, times, square))]
            to = b.add(targets[r], b.mul(block, emit.I64(4 * PER_BLOCK)))
            emit.store(b, emit.lanes(b, both[0], [0, 4, 1, 5, 2, 6, 3, 7], both[1]), to)

    centre_products.each_block(b, n_rows, words, sizes, width, centres, steps, n_blocks, near, write)
