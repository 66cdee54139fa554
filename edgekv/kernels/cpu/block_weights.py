"""A block's weights, p * scale, rounded to integers: what products of bytes take, for the sums over values."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.contract.planes import LEAST_WEIGHT
from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.half import widen
from edgekv.kernels.cpu.jit import intrinsic
from edgekv.kernels.cpu.rounding import ROUND

ROUND_BITS = int(ROUND.view(np.int32))
ROWS = 4  # that share each unpacked code
MORE = 4 * ROWS  # bytes between sizes and shifts
TOP_WEIGHT = 255
LANES = 16
FLOATS, INTS, HALVES, BYTES = (emit.vector(kind, LANES) for kind in (emit.F32, emit.I32, emit.I16, emit.I8))


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


copy_floats, copy_halves, copy_bytes = _copying(emit.F32, 4), _copying(emit.I16, 2), _copying(emit.I8, 1)


def scaled(builder: Any, p: Any, scale: Any) -> list[Any]:
    """p * scale, float16, of a block's tokens."""
    parts = range(0, BLOCK, LANES)
    weights = (emit.load(builder, FLOATS, p, 4 * t) for t in parts)
    scales = (widen(builder, emit.load(builder, HALVES, scale, 2 * t)) for t in parts)
    return [builder.fmul(weight, width) for weight, width in zip(weights, scales, strict=True)]


def rounded(builder: Any, weights: list[Any], highest: int) -> tuple[list[Any], Any]:
    """weights as integers of at most `highest`, ROUND added as floats, and the size of 1."""
    (shifted,), size = all_rounded(builder, [weights], highest)
    return shifted, size


def all_rounded(builder: Any, blocks: list[list[Any]], highest: int) -> tuple[list[list[Any]], Any]:
    """`rounded` of one block, or of four: their sizes are then a vector."""
    top = emit.all_lanes(builder, emit.maximum, [emit.tree(builder, emit.maximum, x) for x in blocks])
    least, most = (emit.constant(top.type, np.float32(x)) for x in (LEAST_WEIGHT, highest))
    factors = builder.fdiv(most, emit.maximum(builder, top, least))
    shifted, round_ = [], emit.constant(FLOATS, ROUND)
    for i, weights in enumerate(blocks):
        if len(blocks) == 1:
            each = emit.splat(builder, factors, LANES)
        else:
            each = emit.lanes(builder, factors, [i] * LANES)
        shifted.append([emit.multiply_add(builder, weight, each, round_) for weight in weights])
    return shifted, builder.fmul(top, emit.constant(top.type, np.float32(1 / highest)))


def store_bytes(builder: Any, shifted: list[Any], byte: int, address: Any) -> None:
    """Byte `byte` of each of `rounded`'s integers."""
    for j, x in enumerate(shifted):
        bits = builder.bitcast(x, INTS)
        if byte:
            bits = builder.lshr(bits, emit.constant(INTS, 8 * byte))
        emit.store(builder, builder.trunc(bits, BYTES), address, LANES * j)


def round_blocks(
    n_rows: int,
    together: int,
    b: Any,
    p: Any,
    gap: Any,
    scale: Any,
    n_blocks: Any,
    middle: Any,
    whole: Any,
    sizes: Any,
) -> None:
    """whole (n_rows, together, BLOCK) = p * scale of blocks as bytes; of missing ones the last is taken.

    sizes (n_rows, together): what 1 stands for, and MORE bytes behind it what the sum of weights times
    (code - middle) has beyond that of weights times codes.
    """
    last = b.sub(n_blocks, emit.I64(1))
    numbers = [emit.I64(i) for i in range(together)]
    blocks = [b.select(b.icmp_signed("<", i, last), i, last) for i in numbers] if together > 1 else numbers
    weights = [
        scaled(
            b,
            b.add(p, b.add(b.mul(gap, emit.I64(4 * r)), b.mul(block, emit.I64(4 * BLOCK)))),
            b.add(scale, b.mul(block, emit.I64(2 * BLOCK))),
        )
        for r in range(n_rows)
        for block in blocks
    ]
    shifted, size = all_rounded(b, weights, TOP_WEIGHT)
    for i, x in enumerate(shifted):
        store_bytes(b, x, 0, b.add(whole, emit.I64(i * BLOCK)))
    each = [emit.tree(b, emit.add, [b.bitcast(x, INTS) for x in block]) for block in shifted]
    total = emit.all_lanes(b, emit.add, each)
    total = b.sub(total, emit.constant(total.type, BLOCK * ROUND_BITS & 0xFFFFFFFF))
    middles = middle if len(weights) == 1 else emit.splat(b, middle, len(weights))
    shift = b.fmul(b.fmul(size, middles), b.sitofp(total, size.type))
    emit.store(b, size, sizes)
    emit.store(b, b.fneg(shift), sizes, MORE)
