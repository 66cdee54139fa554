"""Keys as a centre per 16 tokens and a few bits per element, in planes that are scored by tables of sums.

Centres are in 4 bits, queries in two bytes: x86 multiplies pairs of 16 bits, to which the codes are widened; Arm
multiplies bytes in dot products, a query's high and low bytes apart.

Planes are looked up: four sign bits choose one of 16 entries of a table, many tokens at a time. A block of 64
tokens is stored in four groups of 16, so ordered that the sums come out in order: token t lies in group t % 16
// 4, at byte 4 * (t % 4) + (0, 2, 1, 3)[t // 16]. A vector holds the bytes that as many groups as it has room
for have of the same eight channels; the table of a byte's lower four bits and that of its upper four bits lie in
each 16 bytes of a vector, so that one shuffle within 16 bytes, which nearly every processor has, looks up all of
its tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from edgekv.codecs.planes import CENTRES, LARGEST_FOUR
from edgekv.kernels.cpu import emit
from edgekv.kernels.cpu.compile import CPU_FEATURES, Scalar, fast_jit, intrinsic, jit
from edgekv.kernels.cpu.loops import (
    AT_ONCE,
    CodecKernels,
    address_of,
    chars,
    floats,
    numbers,
    prepare_loop,
    score_loop,
)
from edgekv.kernels.cpu.rope import rotate_row, rotation_numbers
from edgekv.kernels.cpu.scalar import get, maximum, pointer_to, put, round_to_even, widen
from edgekv.kernels.interface import BLOCK
from edgekv.types import F32, U8

NEAR = CENTRES - 1  # scores of a row, each that of as many of a block's tokens
PAIRS_AT_ONCE = 4 if emit.REGISTER == 16 else 2  # of a row and a block whose products are made together
ROWS = {1: 1, 2: 2, 4: PAIRS_AT_ONCE}  # of those that a scan takes together, and
BLOCKS = {1: PAIRS_AT_ONCE, 2: PAIRS_AT_ONCE // 2, 4: 1}  # blocks: by a scan's rows, what is done together
CENTRES_AHEAD = 4
IN_BYTES = emit.IS_ARM
LEVELS, MIDDLE = 15, 7.5

Value = Any  # an llvmlite value
N = emit.REGISTER
STEP = 4 * N if IN_BYTES else 2 * N  # bytes of codes
INTS, CODES, WORDS = emit.vector(emit.I32, N), emit.vector(emit.I8, STEP), emit.vector(emit.I16, 2 * N)
NUMBERS = emit.vector(emit.F32, 4 * PAIRS_AT_ONCE)
# Behind near, for each pair: sums of the other centres in fours of lanes, those of the first centre, the steps.
NEAR_BYTES, FIRST_AT, STEPS_AT, PAIR_BYTES = 64, 4 * N, 8 * N, 8 * N + 64
CENTRE_SCRATCH = NEAR_BYTES + PAIRS_AT_ONCE * PAIR_BYTES
# By bytes of a vector: what a processor needs for its products, and their name.
PRODUCTS = {
    64: ("+avx512bw", "llvm.x86.avx512.pmaddw.d.512"),
    32: ("+avx2", "llvm.x86.avx2.pmadd.wd"),
    16: ("", "llvm.x86.sse2.pmadd.wd"),
}


class Queries(NamedTuple):
    """Rows of queries inside a kernel: addresses of what `_prepare` put, and the channels of a row."""

    tables: Value
    words: Value
    sizes: Value
    factors: Value
    width: Value


class Keys(NamedTuple):
    """Blocks of keys inside a kernel: addresses of the first one's arrays, bits of a key, how many there are."""

    planes: Value
    bits: Value
    scale: Value
    centres: Value
    steps: Value
    n_blocks: Value


def _put_near(b: Any, n_rows: int, queries: Queries, keys: Keys, near: Value) -> None:
    """near (ROWS, BLOCKS, NEAR) float32 = rows' products with the centres of keys' blocks.

    Behind near lies room for what they are made of.
    """
    (_, words, sizes, _, width), (_, _, _, codes, steps, n_blocks) = queries, keys
    rows, together = ROWS[n_rows], BLOCKS[n_rows]
    starts = [b.add(words, b.mul(width, emit.I64(2 * r))) for r in range(rows)]
    half = b.lshr(width, emit.I64(1))
    block_bytes = b.mul(half, emit.I64(CENTRES))
    with emit.loop(b, emit.I64(0), n_blocks, 1) as block:
        first = b.add(codes, b.mul(block.i, block_bytes))
        ahead = b.add(first, b.mul(block_bytes, emit.I64(CENTRES_AHEAD)))
        with emit.loop(b, ahead, b.add(ahead, block_bytes), emit.LINE // 2) as line:
            emit.prefetch(b, line.i, 1)
        sums = _sums(b, starts, width, half, first)
        place, of_block = b.add(near, b.mul(block.i, emit.I64(PAIR_BYTES))), b.mul(block.i, emit.I64(2 * CENTRES))
        step = widen(b, emit.load(b, emit.vector(emit.I16, NEAR), b.add(steps, of_block), 2))
        first_step = widen(b, emit.load(b, emit.I16, b.add(steps, of_block)))
        for r in range(rows):
            own = sums[r * CENTRES : (r + 1) * CENTRES]
            offset = NEAR_BYTES + PAIR_BYTES * r * together
            emit.store(b, emit.in_fours(b, emit.add, own[1:]), place, offset)
            emit.store(b, own[0], place, offset + FIRST_AT)
            emit.store(b, step, place, offset + STEPS_AT)
            emit.store(b, first_step, place, offset + STEPS_AT + 4 * NEAR)
    pairs = [NEAR_BYTES + PAIR_BYTES * i for i in range(PAIRS_AT_ONCE)]
    firsts = emit.all_lanes(b, emit.add, ([emit.load(b, INTS, near, i + FIRST_AT) for i in pairs] * 2)[:4])
    firsts = b.sitofp(emit.lanes(b, firsts, range(PAIRS_AT_ONCE)), emit.vector(emit.F32, PAIRS_AT_ONCE))
    each = b.sitofp(_joined_sums(b, [emit.load(b, INTS, near, i) for i in pairs]), NUMBERS)
    own = [(emit.load(b, emit.F32, sizes, 8 * r), emit.load(b, emit.F32, sizes, 8 * r + 4)) for r in range(rows)]
    size, total = (emit.row(b, [own[r][i] for r in range(rows) for _ in range(together)]) for i in (0, 1))
    middle = b.fmul(total, emit.constant(total.type, MIDDLE))
    first_steps = emit.row(b, [emit.load(b, emit.F32, near, i + STEPS_AT + 4 * NEAR) for i in pairs])
    common = b.fmul(first_steps, b.fsub(firsts, middle))
    four = emit.vector(emit.F32, NEAR)
    step = emit.tree(b, emit.joined, [emit.load(b, four, near, i + STEPS_AT) for i in pairs])
    wide = [i for i in range(PAIRS_AT_ONCE) for _ in range(NEAR)]
    size, middle, common = (emit.lanes(b, x, wide) for x in (size, middle, common))
    emit.store(b, b.fmul(size, emit.multiply_add(b, step, b.fsub(each, middle), common)), near)


def _sums(b: Any, queries: Sequence[Value], width: Value, half: Value, block: Value) -> list[Value]:
    """For each row and centre a vector whose lanes add up to their product."""
    count = len(queries) * CENTRES
    zeros = [emit.constant(INTS, 0)] * (2 * count if IN_BYTES else count)
    with emit.loop(b, emit.I64(0), half, STEP, zeros) as turn:
        parts = [_parts_of(b, query, turn.i, width, half) for query in queries]
        sums = list(turn.values)
        for centre in range(CENTRES):
            address = b.add(b.add(block, turn.i), b.mul(half, emit.I64(centre)))
            lower, upper = _levels(b, emit.load(b, CODES, address))
            for r, (low, high) in enumerate(parts):
                for which, (x, y) in enumerate(zip(low, high, strict=True)):
                    place = r * CENTRES + centre + which * count
                    sums[place] = _add_products(b, upper, y, _add_products(b, lower, x, sums[place]))
        turn.following = sums
    if not IN_BYTES:
        return list(turn.values)
    eight = emit.constant(INTS, 8)
    return [b.add(b.shl(x, eight), y) for x, y in zip(turn.values[:count], turn.values[count:], strict=True)]


def _parts_of(b: Any, query: Value, i: Value, width: Value, half: Value) -> tuple[list[Value], list[Value]]:
    """What lower and upper codes of bytes i.. are multiplied with: one vector, or high and low bytes."""
    if IN_BYTES:
        starts = [b.add(query, b.add(i, offset)) for offset in (emit.I64(0), width)]
        return [emit.load(b, INTS, x) for x in starts], [emit.load(b, INTS, b.add(x, half)) for x in starts]
    start = b.add(query, b.mul(i, emit.I64(2)))
    return [emit.load(b, WORDS, start)], [emit.load(b, WORDS, b.add(start, width))]


def _levels(b: Any, codes: Value) -> tuple[Value, Value]:
    if IN_BYTES:
        both = b.and_(codes, emit.constant(CODES, LEVELS)), b.lshr(codes, emit.constant(CODES, 4))
        lower, upper = (b.bitcast(x, INTS) for x in both)
        return lower, upper
    wide = b.zext(codes, WORDS)
    return b.and_(wide, emit.constant(WORDS, LEVELS)), b.lshr(wide, emit.constant(WORDS, 4))


def _add_products(b: Any, codes: Value, query: Value, so_far: Value) -> Value:
    if IN_BYTES:
        return emit.add_products(b, codes, query, so_far, "s")
    if "+avx512vnni" in CPU_FEATURES and N == 16:
        codes, query = b.bitcast(codes, INTS), b.bitcast(query, INTS)
        return emit.call(b, "llvm.x86.avx512.vpdpwssd.512", INTS, so_far, codes, query)
    return b.add(so_far, _pairs(b, codes, query))


def _pairs(b: Any, x: Value, y: Value) -> Value:
    """x * y, two neighbours' products added up."""
    feature, name = PRODUCTS[2 * x.type.count]
    if feature in CPU_FEATURES:
        return emit.call(b, name, emit.vector(emit.I32, x.type.count // 2), x, y)
    return emit.by_register(b, lambda *parts: _pairs(b, *parts), x, y)


def _joined_sums(b: Any, vectors: list[Value]) -> Value:
    """Four lanes of each of `emit.in_fours`: its sums over all."""
    while vectors[0].type.count > 4 and len(vectors) > 1:
        vectors = [_added(b, *vectors[i : i + 2]) for i in range(0, len(vectors), 2)]
    return emit.tree(b, emit.joined, vectors)


def _added(b: Any, x: Value, y: Value) -> Value:
    """Four lanes and the next four of x added up, then those of y."""
    n = x.type.count
    first = [i + j for i in range(0, 2 * n, 8) for j in range(4)]
    return b.add(emit.lanes(b, x, first, y), emit.lanes(b, x, [i + 4 for i in first], y))


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
    }[emit.IS_ARM, GROUPS]
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
def score_blocks(context: Any, rows: Any, queries: Any, keys: Any, s: Any, gap: Any, near: Any) -> Any:
    """s[m * gap + t] = the score of row m with token t of blocks; `Queries` of the rows, and `Keys`.

    near: room of `CENTRE_SCRATCH` bytes.
    """

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        rows, given, stored, s, gap, near = args
        q, keys, done = (
            Queries(*cgutils.unpack_tuple(b, given)),
            Keys(*cgutils.unpack_tuple(b, stored)),
            emit.I64(0),
        )
        for together in ROW_COUNTS:
            with emit.loop(b, done, rows, together) as turn:
                queries, target = _row(b, q, turn.i), b.add(s, b.mul(turn.i, b.mul(gap, emit.I64(4))))
                write = functools.partial(_score_rows, together)
                emit.call_own(b, f"score_planes_{together}", write, queries, keys, target, gap, near)
            done = turn.i
        return context.get_dummy_value()

    whole = types.intp
    given, stored = (types.UniTuple(whole, len(each._fields)) for each in (Queries, Keys))
    return types.none(whole, given, stored, whole, whole, whole), build


def _row(b: Any, q: Queries, row: Value) -> Queries:
    """The queries from a row on."""
    tables, words = (b.add(x, b.mul(row, b.mul(q.width, emit.I64(n)))) for x, n in ((q.tables, 4), (q.words, 2)))
    sizes, factors = (b.add(x, b.mul(row, emit.I64(n))) for x, n in ((q.sizes, 8), (q.factors, 4)))
    return Queries(tables, words, sizes, factors, q.width)


def _block(b: Any, keys: Keys, width: Value, block: Value, n_blocks: Value) -> Keys:
    """n_blocks of the keys, from a block on."""
    block_bytes = b.mul(b.mul(keys.bits, width), emit.I64(BLOCK // 8))
    centres = b.mul(b.lshr(b.mul(width, emit.I64(CENTRES)), emit.I64(1)), block)
    return Keys(
        planes=b.add(keys.planes, b.mul(block, block_bytes)),
        bits=keys.bits,
        scale=b.add(keys.scale, b.mul(block, emit.I64(2 * BLOCK))),
        centres=b.add(keys.centres, centres),
        steps=b.add(keys.steps, b.mul(block, emit.I64(2 * CENTRES))),
        n_blocks=n_blocks,
    )


def _score_rows(n_rows: int, b: Any, queries: Queries, keys: Keys, s: Value, gap: Value, near: Value) -> None:
    width, together = queries.width, BLOCKS[n_rows]
    with emit.loop(b, emit.I64(0), b.add(keys.n_blocks, emit.I64(together - 1)), together) as few:
        left = b.sub(keys.n_blocks, few.i)
        some = b.select(b.icmp_signed("<", left, emit.I64(together)), left, emit.I64(together))
        stored = _block(b, keys, width, few.i, some)
        for row in range(0, n_rows, ROWS[n_rows]):
            _put_near(b, n_rows, _row(b, queries, emit.I64(row)), stored, b.add(near, emit.I64(4 * NEAR * row)))
        with emit.loop(b, few.i, b.add(few.i, some), 1) as block:
            at = b.add(near, b.mul(b.sub(block.i, few.i), emit.I64(4 * NEAR)))
            target = b.add(s, b.mul(block.i, emit.I64(4 * BLOCK)))
            _scan_block(n_rows, b, queries, _block(b, keys, width, block.i, emit.I64(1)), at, target, gap)


def _scan_block(n_rows: int, b: Any, queries: Queries, keys: Keys, near: Value, s: Value, gap: Value) -> None:
    """s = near + factor * scale * (sums over all planes of a block), for n_rows rows.

    The products of a row with the block's centres lie BLOCKS * NEAR float32 behind those of the row before.
    """
    (tables, _, _, factors, width), (planes, bits, scale, _, _, _) = queries, keys
    block_bytes = b.mul(b.mul(bits, width), emit.I64(BLOCK // 8))
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
                        functools.partial(_near, b, b.add(near, emit.I64(4 * BLOCKS[n_rows] * NEAR * r))),
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


ZERO, ONE, HALF = np.array([0, 1, 0.5], np.float32)
MOST, LARGEST_SPLIT = np.array([LARGEST_FOUR, 127 * 256], np.float32)


class KeyNumbers(NamedTuple):
    """What the loops get of a codec: addresses of its arrays, sizes, and its rotation."""

    planes: int
    scale: int
    centres: int
    centre_step: int
    n_blocks: int
    width: int
    bits: int  # the address of each head's, as those of key_scale and first_plane
    key_scale: int
    head_dim: int
    is_hadamard: int
    matrix: int  # of the rotation; its signs if it is a Hadamard transform
    inverse: int
    first_plane: int
    query_factors: int  # (G, head_dim), of the queries before they are rotated


AT = KeyNumbers(*range(len(KeyNumbers._fields)))  # where each stands


# What a head's queries become, in this order: tables (rows, 4 * width) of bytes, see `_put_tables`; P q
# (rows, width) float32; what it was rounded to, likewise; P q in two bytes (rows, 2 * width); their size and sum
# (rows, 2), then the rounding's step times the head's key_scale (rows,), float32.


@jit
def _query_parts(prepared: int, rows: int, width: int) -> tuple[int, int, int, int, int]:
    """Addresses of the parts of prepared queries."""
    rotated = prepared + 4 * rows * width
    rounded = rotated + 4 * rows * width
    words = rounded + 4 * rows * width
    return prepared, rotated, rounded, words, words + 2 * rows * width


@prepare_loop
def _prepare(store: int, q: int, rows: int, g: int, prepared: int) -> None:
    x = numbers(store)
    width, head_dim, matrix = get(x, AT.width), get(x, AT.head_dim), floats(get(x, AT.matrix))
    factors = floats(get(x, AT.query_factors) + 4 * g * head_dim)
    key_scale = get(floats(get(x, AT.key_scale)), g)
    tables_at, rotated, rounded, words, sizes = _query_parts(prepared, rows, width)
    for m in range(rows):
        row = m * width
        for d in range(head_dim):
            put(floats(rounded), row + d, get(floats(q), m * head_dim + d) * get(factors, d))
        rotate_row(
            *(floats(rounded), row, head_dim, matrix, matrix, get(x, AT.is_hadamard)),
            *(width, floats(rotated), row),
        )
        step = _round_query(floats(rotated), row, width, floats(rounded))
        _put_tables(floats(rounded), row, width, chars(tables_at), 4 * row)
        for d in range(row, row + width):
            put(floats(rounded), d, get(floats(rounded), d) * step)
        size, total = _in_two_bytes(floats(rotated), row, width, chars(words), 2 * row)
        put(floats(sizes), 2 * m, size)
        put(floats(sizes), 2 * m + 1, np.float32(total))
        put(floats(sizes), 2 * rows + m, key_scale * step)


@score_loop
def _score(store: int, prepared: int, rows: int, g: int, t: int, n: int, s: int, gap: int, scratch: int) -> None:
    done = 0
    while done < n:
        i = (t + done) % BLOCK
        if i == 0 and n - done >= BLOCK:
            few = (n - done) // BLOCK * BLOCK
            scan_blocks(store, prepared, rows, g, (t + done) // BLOCK, few // BLOCK, s + 4 * done, gap, scratch)
        else:
            few, part = min(BLOCK - i, n - done), scratch + CENTRE_SCRATCH
            scan_blocks(store, prepared, rows, g, (t + done) // BLOCK, 1, part, BLOCK, scratch)
            for m in range(rows):
                for k in range(few):
                    put(floats(s), m * gap + done + k, get(floats(part), m * BLOCK + i + k))
        done += few


@fast_jit
def scan_blocks(
    store: int, prepared: int, rows: int, g: int, block: int, n_blocks: int, s: int, gap: int, scratch: int
) -> None:
    x = numbers(store)
    width, bits, of_head = get(x, AT.width), get(numbers(get(x, AT.bits)), g), g * get(x, AT.n_blocks) + block
    first = get(numbers(get(x, AT.first_plane)), g) * get(x, AT.n_blocks) + block * bits
    tables_at, _, _, words, sizes = _query_parts(prepared, rows, width)
    queries = tables_at, words, sizes, sizes + 8 * rows, width
    keys = (
        get(x, AT.planes) + first * width * BLOCK // 8,
        bits,
        get(x, AT.scale) + 2 * BLOCK * of_head,
        get(x, AT.centres) + of_head * CENTRES * width // 2,
        get(x, AT.centre_step) + 2 * CENTRES * of_head,
        n_blocks,
    )
    score_blocks(rows, queries, keys, s, gap, scratch)


def _store_numbers(codec: Any) -> KeyNumbers:
    a, of_heads = codec.arrays, ("bits", "key_scale", "first_plane", "query_factors")
    return KeyNumbers(
        **{name: address_of(a[name]) for name in ("planes", "scale", "centres", "centre_step")},
        **{name: address_of(getattr(codec, name)) for name in of_heads},
        **{"n_blocks": a["planes"].shape[1], "width": codec.width, "head_dim": codec.head_dim},
        **rotation_numbers(codec.rotation),
    )


def _prepared_bytes(codec: Any, rows: int) -> int:
    size: int = rows * (14 * codec.width + 12)
    return size


KEYS = CodecKernels(
    _store_numbers,
    prepare=_prepare,
    score=_score,
    prepared=_prepared_bytes,
    scratch=lambda codec, rows: CENTRE_SCRATCH + 4 * rows * BLOCK,
    at_once=AT_ONCE,
)


@jit
def _in_two_bytes(x: F32, start: int, n: int, halves: U8, target: int) -> tuple[Scalar, int]:
    """x[start:][:n] ~ size * (256 * high + low), from `target` on; returns size, and the sum of 256 * high + low.

    For Arm n bytes high, then n bytes low, which have signs; else words of two bytes, which have a sign. The error
    is at most 2 ** -16 of the largest element.
    """
    largest, total = ZERO, 0
    for d in range(start, start + n):
        largest = maximum(largest, abs(get(x, d)))
    size = largest / LARGEST_SPLIT
    divisor = ONE if size == ZERO else size
    for d in range(n):
        whole = np.int32(round_to_even(get(x, start + d) / divisor))
        total += whole
        if IN_BYTES:
            put(halves, target + d, np.uint8(np.int32(whole + 128) >> 8 & 255))
            put(halves, target + n + d, np.uint8(whole & 255))
        else:
            put(halves, target + 2 * d, np.uint8(whole & 255))
            put(halves, target + 2 * d + 1, np.uint8(whole >> 8 & 255))
    return size, total


@jit
def _round_query(q: F32, row: int, width: int, rounded: F32) -> Scalar:
    """rounded[row:][:width] = `edgekv.codecs.planes.round_queries` of q[row:][:width]; returns the step."""
    largest = ZERO
    for d in range(row, row + width, 4):
        four = abs(get(q, d)) + abs(get(q, d + 1)) + abs(get(q, d + 2)) + abs(get(q, d + 3))
        largest = maximum(largest, four)
    step = largest / MOST
    divisor = ONE if step == ZERO else step
    for d in range(row, row + width):
        put(rounded, d, np.float32(np.floor(get(q, d) / divisor)) + HALF)
    return step


@jit
def _put_tables(rounded: F32, row: int, width: int, entries: U8, target: int) -> None:
    """Per four elements the 16 sums of + (bit 1) or - (bit 0) each, plus a middle, as `tables` wants them."""
    for column in range(width // 8):
        at = target + place_of_table(column)
        store_table(rounded, row + 8 * column, entries, at)
        store_table(rounded, row + 8 * column + 4, entries, at + VECTOR)
