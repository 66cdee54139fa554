"""Scores of blocks of keys in planes: products with their centres, and sums of all planes by tables.

Signed sums looked up: four sign bits choose one of 16 entries of a table, many tokens at a time.

A block of 64 tokens is stored in four groups of 16, so ordered that the sums come out in order: token t lies in
group t % 16 // 4, at byte 4 * (t % 4) + (0, 2, 1, 3)[t // 16]. A vector holds the bytes that as many groups as
it has room for have of the same eight channels; the table of a byte's lower four bits and that of its upper four
bits lie in each 16 bytes of a vector, so that one shuffle within 16 bytes, which nearly every processor has, looks
up all of its tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.cpu import arm, centre_products, emit
from edgekv.kernels.cpu.compile import CPU_FEATURES, intrinsic, jit
from edgekv.kernels.cpu.scalar import pointer_to, widen

GROUP, RUN = 16, 16  # bytes of a group's channels, tokens that neighbour each other in a score
GROUPS = 4 if "+avx512bw" in CPU_FEATURES else 2 if "+avx2" in CPU_FEATURES else 1  # in a vector
COLUMNS, VECTOR = GROUPS, GROUPS * GROUP  # of eight channels, in what is loaded at once; its bytes
PARTS = 4 // GROUPS  # vectors of a block
# By rows, parts whose sums are made together: what the registers hold.
TOGETHER = {1: PARTS, 2: PARTS, 4: min(PARTS, 1 if emit.FEW_REGISTERS else 2)}
ROW_COUNTS = 4, 2, 1
MIDDLE_ENTRY = 64  # added to an entry, so that it is at least 0
CHUNK = 128  # channels whose sums fit 16 bits in four planes
BLOCKS_AHEAD = 4

Value = Any  # an llvmlite value
BYTES, PAIRS = emit.vector(emit.I8, GROUPS * GROUP), emit.vector(emit.I16, GROUPS * GROUP // 2)
TABLE, TOKENS = emit.vector(emit.I8, 16), 4 * GROUPS  # tokens of a run that a part has
FLOATS, WHOLE = emit.vector(emit.F32, TOKENS), emit.vector(emit.I32, TOKENS)


@jit
def place_of_table(column: int) -> int:
    """Of the table of a column's lower four channels; that of its upper four lies VECTOR bytes behind it."""
    return column // COLUMNS * 2 * VECTOR + column % COLUMNS * GROUP


@intrinsic
def store_table(context: Any, x: Any, i: Any, tables: Any, table: Any) -> Any:
    """tables[table + k] = 64 + the sum of x[i + j], times -1 where bit j of k is 0; k is 0 to 15, j is 0 to 3.

    x are odd halves whose sums are at most 63.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = emit.vector(emit.I16, 16)
        total = emit.constant(kind, 2 * MIDDLE_ENTRY)
        for j in range(4):
            one = builder.load(pointer_to(context, builder, x, (args[0], builder.add(args[1], args[1].type(j)))))
            twice = builder.fptosi(builder.fadd(one, one), emit.I16)  # odd; half of it is added or subtracted
            signs = ir.Constant(kind, [1 if k >> j & 1 else -1 for k in range(16)])
            total = builder.add(total, builder.mul(emit.splat(builder, twice, 16), signs))
        entries = builder.trunc(builder.lshr(total, emit.constant(kind, 1)), TABLE)
        pointer = builder.bitcast(pointer_to(context, builder, tables, args[2:]), TABLE.as_pointer())
        builder.store(entries, pointer, align=1)
        return context.get_dummy_value()

    return types.none(x, types.intp, tables, types.intp), build


def sums(
    b: Any, n_rows: int, n_parts: int, tables: Value, width: Value, planes: Value, bits: Value, channels: Value
) -> list[tuple[Value, Value]]:
    """Of each part and row, 16 bits wide: sums of even bytes (with the odd ones' above them), and of odd bytes."""
    alone = n_rows == 1  # then columns are added up at the end, else groups are brought together before
    n_sums = n_parts * n_rows * (GROUPS if alone else 1)
    zeros = [emit.constant(PAIRS, 0)] * (2 * n_sums)
    group_bytes, row_bytes = b.mul(width, emit.I64(2)), b.mul(width, emit.I64(4))
    with emit.loop(b, emit.I64(0), bits, 1, zeros) as plane:
        values = plane.values
        doubled = emit.either(
            b, b.icmp_signed(">", plane.i, emit.I64(0)), lambda: [b.add(x, x) for x in values], lambda: values
        )
        code = b.add(planes, b.mul(plane.i, b.mul(width, emit.I64(8))))
        with emit.loop(b, emit.I64(0), b.lshr(channels, emit.I64(3)), COLUMNS, doubled) as column:
            sums = list(column.values)
            table = b.add(tables, b.mul(column.i, emit.I64(2 * GROUP)))
            for p in range(n_parts):
                place = b.add(code, b.mul(column.i, emit.I64(GROUP)))
                place = b.add(place, b.mul(group_bytes, emit.I64(p * GROUPS)))
                apart = [b.mul(group_bytes, emit.I64(group)) for group in range(GROUPS)]
                groups = [emit.load(b, BYTES, b.add(place, offset)) for offset in apart]
                for i, x in enumerate(groups if alone else _transposed(b, groups)):
                    lower = b.and_(x, emit.constant(BYTES, 15))
                    upper = b.lshr(x, emit.constant(BYTES, 4))
                    for r in range(n_rows):
                        own = b.add(table, b.mul(row_bytes, emit.I64(r)))
                        kind, offset = (BYTES, 0) if alone else (TABLE, GROUP * i)
                        entries = b.add(
                            _look_up(b, emit.load(b, kind, own, offset), lower),
                            _look_up(b, emit.load(b, kind, own, offset + VECTOR), upper),
                        )
                        at, pairs = 2 * (p * GROUPS + i if alone else p * n_rows + r), b.bitcast(entries, PAIRS)
                        sums[at] = b.add(sums[at], pairs)
                        sums[at + 1] = b.add(sums[at + 1], b.lshr(pairs, emit.constant(PAIRS, 8)))
            column.following = sums
        plane.following = column.values
    first, second = plane.values[::2], plane.values[1::2]
    if alone:
        starts = range(0, n_sums, GROUPS)
        first, second = ([_columns_added(b, x[i : i + GROUPS]) for i in starts] for x in (first, second))
    return list(zip(first, second, strict=True))


def _columns_added(b: Any, groups: list[Value]) -> Value:
    """For each of as many groups as columns the sums over columns."""
    while len(groups) > 1:
        pairs = zip(groups[::2], groups[1::2], strict=True)
        groups = [b.add(*(_every_other(b, x, y, i) for i in (0, 1))) for x, y in pairs]
    return groups[0]


def _every_other(b: Any, x: Value, y: Value, first: int) -> Value:
    """16 bytes each: the first, third, ... of x, then of y; or the second, fourth, ..."""
    size = PAIRS.count // GROUPS
    return emit.lanes(b, x, [size * i + j for i in range(first, 2 * GROUPS, 2) for j in range(size)], y)


def _transposed(b: Any, xs: Sequence[Value]) -> list[Value]:
    """Vector i of the result has the i-th 16 bytes of each of xs."""
    n = len(xs)
    if n == 1:
        return list(xs)
    if n == 2:
        return [_chosen(b, xs[0], xs[1], (i, 2 + i)) for i in range(2)]
    result = []
    for i in (0, 2):
        x, y = (_chosen(b, xs[j], xs[j + 1], (i, i + 1, 4 + i, 5 + i)) for j in (0, 2))
        result += [_chosen(b, x, y, range(j, 8, 2)) for j in (0, 1)]
    return result


def _chosen(b: Any, x: Value, y: Value, which: Sequence[int]) -> Value:
    """16 bytes each of x, and of y behind it."""
    return emit.lanes(b, x, [GROUP * i + byte for i in which for byte in range(GROUP)], y)


def _look_up(b: Any, table: Value, index: Value) -> Value:
    """The entries of a table, or of one in each 16 bytes, that the bytes of ``index`` choose."""
    name = {
        (False, 4): "llvm.x86.avx512.pshuf.b.512",
        (False, 2): "llvm.x86.avx2.pshuf.b",
        (False, 1): "llvm.x86.ssse3.pshuf.b.128" if "+ssse3" in CPU_FEATURES else "",
        (True, 1): "llvm.aarch64.neon.tbl1.v16i8",
    }[arm.IS_ARM, GROUPS]
    if not name:
        return _look_up_one_by_one(b, table, index)
    if table.type != index.type:
        table = emit.lanes(b, table, list(range(16)) * GROUPS)
    return emit.call(b, name, BYTES, table, index)


def _look_up_one_by_one(b: Any, table: Value, index: Value) -> Value:
    result = ir.Constant(BYTES, ir.Undefined)
    for i in range(BYTES.count):
        entry = b.extract_element(table, b.extract_element(index, emit.I32(i)))
        result = b.insert_element(result, entry, emit.I32(i))
    return result


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
