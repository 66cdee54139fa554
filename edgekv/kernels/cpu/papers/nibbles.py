"""A block's weighted sum of 4-bit codes, token by token in memory, in integer dot products.

Four tokens' bytes are brought side by side, 16 of each in a register's 128 bits, and both nibbles multiplied with
the two bytes of the tokens' weights, which thus have 16 bits.
"""

from typing import Any

from numba import types

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.cpu import arm, block_weights, dot, emit
from edgekv.kernels.cpu.jit import intrinsic
from edgekv.kernels.cpu.rounding import ROUND
from edgekv.kernels.cpu.simd import LANES

TOP_WEIGHT = 65535
TOGETHER = 16  # tokens, at most: what is summed at once must be whole such groups
HIGH_AT, SIZES_AT = BLOCK, 2 * BLOCK  # in a row's weights: the high bytes, and (size, shift)
WEIGHTS_BYTES = SIZES_AT + 8
N = 4 if arm.IS_ARM else LANES  # lanes of a product: where a register has four, of one register
# The weights' bytes that one pass over the codes multiplies: sums of both need 16 registers.
PASSES = ((0,), (HIGH_AT,)) if emit.FEW_REGISTERS else ((0, HIGH_AT),)
NIBBLES = 0x0F0F0F0F


@intrinsic
def round_weights(context: Any, p: Any, delta: Any, zero: Any, weights: Any) -> Any:
    """p * delta of a block's tokens in 16 bits, their size, and what their zero points add to the sum of codes."""

    def build(context: Any, b: Any, signature: Any, args: Any) -> Any:
        p, delta, zero, weights = args
        shifted, size = block_weights.rounded(b, block_weights.scaled(b, p, delta), TOP_WEIGHT)
        block_weights.store_bytes(b, shifted, 0, weights)
        block_weights.store_bytes(b, shifted, 1, b.add(weights, emit.I64(HIGH_AT)))
        kind = block_weights.FLOATS
        products = []
        for j, x in enumerate(shifted):
            points = b.zext(emit.load(b, block_weights.BYTES, zero, kind.count * j), block_weights.INTS)
            whole = emit.subtract(b, x, emit.constant(kind, ROUND))
            products.append(b.fmul(whole, b.sitofp(points, kind)))
        total = emit.total(b, emit.tree(b, type(b).fadd, products))
        emit.store(b, size, weights, SIZES_AT)
        emit.store(b, b.fneg(b.fmul(size, total)), weights, SIZES_AT + 4)
        return context.get_dummy_value()

    return types.none(*[types.intp] * 4), build


@intrinsic
def add_row(context: Any, weights: Any, first: Any, n: Any, codes: Any, half: Any, out: Any) -> Any:
    """out (2 * half,) += size * (weights from token `first` on times the codes of n tokens) + shift.

    n is a multiple of TOGETHER, codes the address of the first token's. Bytes behind the last 16 are left out.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit.call_own(builder, "add_nibbles", _write, *args)
        return context.get_dummy_value()

    return types.none(*[types.intp] * 6), build


def _write(b: Any, weights: Any, first: Any, n: Any, codes: Any, half: Any, out: Any) -> None:
    size, shift = (emit.splat(b, emit.load(b, emit.F32, weights, SIZES_AT + i), TOGETHER) for i in (0, 4))
    start, done = b.add(weights, first), emit.I64(0)
    width = 4 * N  # bytes of a token
    while width >= 16:
        with emit.loop(b, done, half, width) as turn:
            sums = _sums(b, start, n, b.add(codes, turn.i), half, width)
            for nibble, target in ((0, turn.i), (1, b.add(turn.i, half))):
                for chunk in range(width // 16):
                    address = b.add(out, b.mul(b.add(target, emit.I64(16 * chunk)), emit.I64(4)))
                    so_far = b.fadd(emit.load(b, size.type, address), shift)
                    total = b.sitofp(_in_order(b, sums[nibble], chunk), size.type)
                    emit.store(b, emit.multiply_add(b, total, size, so_far), address)
        done = b.and_(half, emit.I64(-width))
        width //= 2


def _sums(b: Any, weights: Any, n: Any, codes: Any, half: Any, width: int) -> list[list[Any]]:
    """For each nibble four vectors of int32: vector k has channels 16 i + 4 k .. of `width` bytes at 4 i.."""
    groups = 4 * N // width  # of four tokens, in one register
    kind = emit.vector(emit.I32, N)
    result: list[Any] = []
    for which in PASSES:
        zeros = [emit.constant(kind, 0)] * (8 * len(which))
        with emit.loop(b, emit.I64(0), n, 4 * groups, zeros) as turn:
            start = b.add(codes, b.mul(turn.i, half))
            unpacked = _unpacked(b, start, half, width, groups)
            for place, offset in enumerate(which):
                words = emit.load(b, emit.vector(emit.I32, groups), b.add(weights, turn.i), offset)
                words = emit.lanes(b, words, [group for group in range(groups) for _ in range(N // groups)])
                so_far = turn.values[8 * place : 8 * place + 8]
                turn.following = [
                    *turn.following[: 8 * place],
                    *(dot.products(b, words, x, y) for x, y in zip(unpacked, so_far, strict=True)),
                    *turn.following[8 * place + 8 :],
                ]
        result += turn.values
    high = [b.shl(x, emit.constant(kind, 8)) for x in result[8:]]
    both = [_folded(b, b.add(x, y), groups) for x, y in zip(result[:8], high, strict=True)]
    return [both[:4], both[4:]]


def _unpacked(b: Any, start: Any, half: Any, width: int, groups: int) -> list[Any]:
    """The low nibbles of 4 * groups tokens, four tokens to a lane, then the high ones, as `_sums` has them."""
    tokens = []
    for i in range(4):
        parts = []
        for group in range(groups):
            address = b.add(start, b.mul(half, emit.I64(4 * group + i)))
            parts.append(emit.load(b, emit.vector(emit.I8, width), address))
            emit.prefetch(b, b.add(address, b.mul(half, emit.I64(BLOCK))), width)
        tokens.append(emit.tree(b, _joined, parts))
    pairs = [
        _interleaved(b, tokens[i], tokens[i + 1], 1, upper) for i in (0, 2) for upper in (0, 1)
    ]  # low, high, low, high
    quads = [_interleaved(b, pairs[i], pairs[i + 2], 2, upper) for i in (0, 1) for upper in (0, 1)]
    kind = emit.vector(emit.I32, N)
    mask, words = emit.constant(kind, NIBBLES), [b.bitcast(x, kind) for x in quads]
    low = [b.and_(x, mask) for x in words]
    return low + [b.and_(b.lshr(x, emit.constant(kind, 4)), mask) for x in words]


def _joined(b: Any, x: Any, y: Any) -> Any:
    return emit.lanes(b, x, range(2 * x.type.count), y)


def _interleaved(b: Any, x: Any, y: Any, size: int, upper: int) -> Any:
    """Elements of `size` bytes by turns from x and y, of the lower or upper 8 bytes of each 128 bits."""
    n = x.type.count
    which = []
    for register in range(0, n, 16):
        for element in range(0, 8, size):
            at = register + 8 * upper + element
            which += [*range(at, at + size), *range(n + at, n + at + size)]
    return emit.lanes(b, x, which, y)


def _folded(b: Any, x: Any, groups: int) -> Any:
    """The sum of a register's groups of tokens."""
    n = N // groups
    parts = [emit.lanes(b, x, range(group * n, (group + 1) * n)) for group in range(groups)]
    return emit.tree(b, type(b).add, parts)


def _in_order(b: Any, vectors: list[Any], chunk: int) -> Any:
    """Channels 16 * chunk.. of `_sums`' four vectors."""
    return emit.tree(b, _joined, [emit.lanes(b, x, range(4 * chunk, 4 * chunk + 4)) for x in vectors])
