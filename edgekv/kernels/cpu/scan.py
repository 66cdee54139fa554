"""Scores of blocks of keys in planes: products with their centres, and sums of all planes by tables."""

import functools
from typing import Any

from numba import types

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.cpu import centre_products, emit
from edgekv.kernels.cpu.half import widen
from edgekv.kernels.cpu.jit import intrinsic
from edgekv.kernels.cpu.tables import CHUNK, GROUPS, MIDDLE_ENTRY, PAIRS, PARTS, TOGETHER, sums

RUN, TOKENS = 16, 4 * GROUPS  # tokens that neighbour each other in a score, and those of them that a part has
ROW_COUNTS = 4, 2, 1
BLOCKS_AHEAD = 4

Value = Any  # an llvmlite value
FLOATS, WHOLE = emit.vector(emit.F32, TOKENS), emit.vector(emit.I32, TOKENS)


@intrinsic
def score_blocks(
    context: Any,
    tables: Any,
    words: Any,
    sizes: Any,
    factors: Any,
    rows: Any,
    width: Any,
    planes: Any,
    bits: Any,
    scale: Any,
    centres: Any,
    steps: Any,
    n_blocks: Any,
    s: Any,
    gap: Any,
    near: Any,
) -> Any:
    """s[m * gap + t] = the score of row m with token t of n_blocks blocks.

    Addresses of the rows' tables (4 * width bytes each), of what `centre_products` wants of queries and their
    sizes, and of their factors; of the first block's planes, scales, centres and their steps. near: room of
    `centre_products.SCRATCH` bytes.
    """

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        tables, words, sizes, factors, rows, width, *stored, s, gap, near = args
        done = emit.I64(0)
        for together in ROW_COUNTS:
            with emit.loop(b, done, rows, together) as turn:
                own = (
                    b.add(tables, b.mul(turn.i, b.mul(width, emit.I64(4)))),
                    b.add(words, b.mul(turn.i, b.mul(width, emit.I64(2)))),
                    b.add(sizes, b.mul(turn.i, emit.I64(8))),
                    b.add(factors, b.mul(turn.i, emit.I64(4))),
                )
                target = b.add(s, b.mul(turn.i, b.mul(gap, emit.I64(4))))
                write = functools.partial(_score_rows, together)
                emit.call_own(b, f"score_planes_{together}", write, *own, width, *stored, target, gap, near)
            done = turn.i
        return context.get_dummy_value()

    return types.none(*[types.intp] * 15), build


def _score_rows(
    n_rows: int,
    b: Any,
    tables: Value,
    words: Value,
    sizes: Value,
    factors: Value,
    width: Value,
    planes: Value,
    bits: Value,
    scale: Value,
    centres: Value,
    steps: Value,
    n_blocks: Value,
    s: Value,
    gap: Value,
    near: Value,
) -> None:
    block_bytes = b.mul(b.mul(bits, width), emit.I64(BLOCK // 8))

    def write(block: Value, at: Value) -> None:
        _scan_block(
            *(n_rows, b, tables, width, b.add(planes, b.mul(block, block_bytes)), bits),
            *(b.add(scale, b.mul(block, emit.I64(2 * BLOCK))), factors, at),
            *(b.add(s, b.mul(block, emit.I64(4 * BLOCK))), gap, block_bytes),
        )

    centre_products.each_block(b, n_rows, words, sizes, width, centres, steps, n_blocks, near, write)


def _scan_block(
    n_rows: int,
    b: Any,
    tables: Value,
    width: Value,
    planes: Value,
    bits: Value,
    scale: Value,
    factors: Value,
    near: Value,
    s: Value,
    gap: Value,
    block_bytes: Value,
) -> None:
    """s = near + factor * scale * (sums over all planes of a block), for n_rows rows."""
    emit.prefetch(b, b.add(scale, emit.I64(2 * BLOCK * BLOCKS_AHEAD)), 2 * BLOCK)
    ahead = b.add(planes, b.mul(block_bytes, emit.I64(BLOCKS_AHEAD)))
    with emit.loop(b, ahead, b.add(ahead, block_bytes), 4 * emit.LINE) as lines:
        emit.prefetch(b, lines.i, 4 * emit.LINE)
    targets = [b.add(s, b.mul(gap, emit.I64(4 * r))) for r in range(n_rows)]
    unit = emit.F32(2.0**-16)  # sums come in the upper 16 bits of 32
    each = [emit.splat(b, b.fmul(emit.load(b, emit.F32, factors, 4 * r), unit), TOKENS) for r in range(n_rows)]
    below = b.sub(b.shl(emit.I64(1), bits), emit.I64(1))
    with emit.loop(b, emit.I64(0), b.add(width, emit.I64(CHUNK - 1)), CHUNK) as chunk:
        left = b.sub(width, chunk.i)
        channels = b.select(b.icmp_signed("<", left, emit.I64(CHUNK)), left, emit.I64(CHUNK))
        less = b.trunc(b.mul(b.mul(below, channels), emit.I64(MIDDLE_ENTRY // 4)), emit.I16)
        less = emit.splat(b, less, PAIRS.count)
        with emit.loop(b, emit.I64(0), emit.I64(PARTS), TOGETHER[n_rows]) as part:
            first = b.add(planes, b.mul(part.i, b.mul(width, emit.I64(2 * GROUPS))))
            first = b.add(first, b.mul(chunk.i, emit.I64(2)))
            entries = b.add(tables, b.mul(chunk.i, emit.I64(4)))
            totals = sums(b, n_rows, TOGETHER[n_rows], entries, width, first, bits, channels)
            for p in range(TOGETHER[n_rows]):
                place = b.add(part.i, emit.I64(p))
                scales = b.add(scale, b.mul(place, emit.I64(2 * TOKENS)))
                widths = [
                    widen(b, emit.load(b, emit.vector(emit.I16, TOKENS), scales, 2 * RUN * run))
                    for run in range(BLOCK // RUN)
                ]
                for r, target in enumerate(targets):
                    at = b.add(target, b.mul(place, emit.I64(4 * TOKENS)))
                    so_far = emit.either(
                        b,
                        b.icmp_signed(">", chunk.i, emit.I64(0)),
                        functools.partial(_so_far, b, at),
                        functools.partial(_near, b, b.add(near, emit.I64(centre_products.row_bytes(n_rows) * r))),
                    )
                    for run, x in enumerate(_in_runs(b, totals[p * n_rows + r], less)):
                        product = b.fmul(b.sitofp(x, FLOATS), widths[run])
                        total = emit.multiply_add(b, product, each[r], so_far[run])
                        emit.store(b, total, at, 4 * RUN * run)


def _so_far(b: Any, s: Value) -> list[Value]:
    return [emit.load(b, FLOATS, s, 4 * RUN * run) for run in range(BLOCK // RUN)]


def _near(b: Any, near: Value) -> list[Value]:
    """The scores of a row with the centres of the runs."""
    return [emit.splat(b, emit.load(b, emit.F32, near, 4 * run), TOKENS) for run in range(BLOCK // RUN)]


def _in_runs(b: Any, pair: tuple[Value, Value], less: Value) -> list[Value]:
    """Sums, less ``less``, times 2 ** 16: of the tokens that a part has of each run."""
    first, second = pair
    even = b.sub(first, b.shl(second, emit.constant(PAIRS, 8)))
    result = []
    for x in (even, second):
        whole = b.bitcast(b.sub(x, less), WHOLE)
        result += [b.shl(whole, emit.constant(WHOLE, 16)), b.and_(whole, emit.constant(WHOLE, 0xFFFF0000))]
    return result
