"""Products of queries in two bytes with blocks' centres in 4 bits, for a few pairs of a row and a block at a time.

x86 multiplies pairs of 16 bits, to which the codes are widened. Arm multiplies bytes in dot products: there a
query's high and low bytes have products of their own.
"""

from collections.abc import Callable, Sequence
from typing import Any

from edgekv.kernels.contract.planes import CENTRES
from edgekv.kernels.cpu import arm, emit
from edgekv.kernels.cpu.compile import CPU_FEATURES
from edgekv.kernels.cpu.scalar import widen

NEAR = CENTRES - 1  # scores of a row, each that of as many of a block's tokens
PAIRS = 4 if emit.REGISTER == 16 else 2  # of a row and a block whose products are made together
ROWS = {1: 1, 2: 2, 4: PAIRS}  # of those that a scan takes together, and
BLOCKS = {1: PAIRS, 2: PAIRS // 2, 4: 1}  # blocks: by a scan's rows, what is done together
BLOCKS_AHEAD = 4
IN_BYTES = arm.IS_ARM
LEVELS, MIDDLE = 15, 7.5

Value = Any  # an llvmlite value
N = emit.REGISTER
STEP = 4 * N if IN_BYTES else 2 * N  # bytes of codes
INTS, CODES, WORDS = emit.vector(emit.I32, N), emit.vector(emit.I8, STEP), emit.vector(emit.I16, 2 * N)
NUMBERS = emit.vector(emit.F32, 4 * PAIRS)
# Behind near, for each pair: sums of the other centres in fours of lanes, those of the first centre, the steps.
NEAR_BYTES, FIRST_AT, STEPS_AT, PAIR_BYTES = 64, 4 * N, 8 * N, 8 * N + 64
SCRATCH = NEAR_BYTES + PAIRS * PAIR_BYTES
# By bytes of a vector: what a processor needs for its products, and their name.
PRODUCTS = {
    64: ("+avx512bw", "llvm.x86.avx512.pmaddw.d.512"),
    32: ("+avx2", "llvm.x86.avx2.pmadd.wd"),
    16: ("", "llvm.x86.sse2.pmadd.wd"),
}


def each_block(
    b: Any,
    n_rows: int,
    words: Value,
    sizes: Value,
    width: Value,
    centres: Value,
    steps: Value,
    n_blocks: Value,
    near: Value,
    write: Callable[[Value, Value], None],
) -> None:
    """Of every block calls write(its number, the address of its first row's NEAR products with the centres).

    Those of the next row lie `row_bytes` behind. The other arguments are those of `put_near`.
    """
    together, block_bytes = BLOCKS[n_rows], b.lshr(b.mul(width, emit.I64(CENTRES)), emit.I64(1))
    with emit.loop(b, emit.I64(0), b.add(n_blocks, emit.I64(together - 1)), together) as few:
        left = b.sub(n_blocks, few.i)
        some = b.select(b.icmp_signed("<", left, emit.I64(together)), left, emit.I64(together))
        first = b.add(centres, b.mul(few.i, block_bytes))
        first_steps = b.add(steps, b.mul(few.i, emit.I64(2 * CENTRES)))
        for row in range(0, n_rows, ROWS[n_rows]):
            queries = b.add(words, b.mul(width, emit.I64(2 * row))), b.add(sizes, emit.I64(8 * row))
            put_near(b, n_rows, *queries, width, first, first_steps, some, b.add(near, emit.I64(4 * NEAR * row)))
        with emit.loop(b, few.i, b.add(few.i, some), 1) as block:
            write(block.i, b.add(near, b.mul(b.sub(block.i, few.i), emit.I64(4 * NEAR))))


def row_bytes(n_rows: int) -> int:
    """Between the products of two rows with a block's centres."""
    return 4 * BLOCKS[n_rows] * NEAR


def put_near(
    b: Any,
    n_rows: int,
    queries: Value,
    sizes: Value,
    width: Value,
    codes: Value,
    steps: Value,
    n_blocks: Value,
    near: Value,
) -> None:
    """near (ROWS, BLOCKS, NEAR) float32 = rows' products with the centres of blocks, of which there are n_blocks.

    queries: what `centres.split` or `centres.as_words` has put, 2 * width bytes to a row. sizes (rows, 2): what
    1 of a query stands for, and the sum of its numbers. Behind near lies room for what they are made of.
    """
    rows, together = ROWS[n_rows], BLOCKS[n_rows]
    starts = [b.add(queries, b.mul(width, emit.I64(2 * r))) for r in range(rows)]
    half = b.lshr(width, emit.I64(1))
    block_bytes = b.mul(half, emit.I64(CENTRES))
    with emit.loop(b, emit.I64(0), n_blocks, 1) as block:
        first = b.add(codes, b.mul(block.i, block_bytes))
        ahead = b.add(first, b.mul(block_bytes, emit.I64(BLOCKS_AHEAD)))
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
    pairs = [NEAR_BYTES + PAIR_BYTES * i for i in range(PAIRS)]
    firsts = emit.all_lanes(b, emit.add, ([emit.load(b, INTS, near, i + FIRST_AT) for i in pairs] * 2)[:4])
    firsts = b.sitofp(emit.lanes(b, firsts, range(PAIRS)), emit.vector(emit.F32, PAIRS))
    each = b.sitofp(_joined_sums(b, [emit.load(b, INTS, near, i) for i in pairs]), NUMBERS)
    own = [(emit.load(b, emit.F32, sizes, 8 * r), emit.load(b, emit.F32, sizes, 8 * r + 4)) for r in range(rows)]
    size, total = (emit.row(b, [own[r][i] for r in range(rows) for _ in range(together)]) for i in (0, 1))
    middle = b.fmul(total, emit.constant(total.type, MIDDLE))
    first_steps = emit.row(b, [emit.load(b, emit.F32, near, i + STEPS_AT + 4 * NEAR) for i in pairs])
    common = b.fmul(first_steps, b.fsub(firsts, middle))
    four = emit.vector(emit.F32, NEAR)
    step = emit.tree(b, emit.joined, [emit.load(b, four, near, i + STEPS_AT) for i in pairs])
    wide = [i for i in range(PAIRS) for _ in range(NEAR)]
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
        return arm.add_products(b, codes, query, so_far, "s")
    if "+avx512vnni" in CPU_FEATURES and N == 16:
        codes, query = b.bitcast(codes, INTS), b.bitcast(query, INTS)
        return emit.call(b, "llvm.x86.avx512.vpdpwssd.512", INTS, so_far, codes, query)
    return b.add(so_far, _pairs(b, codes, query))


def _pairs(b: Any, x: Value, y: Value) -> Value:
    """x * y, two neighbours' products added up."""
    feature, name = PRODUCTS[2 * x.type.count]
    if feature in CPU_FEATURES:
        return emit.call(b, name, emit.vector(emit.I32, x.type.count // 2), x, y)
    return arm.by_register(b, lambda *parts: _pairs(b, *parts), x, y)


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
