"""Keys and values as bit planes per token, of which only those that matter are read."""

from typing import Any, NamedTuple

import numpy as np

from edgekv.kernels.contract.attention import BLOCK
from edgekv.kernels.cpu import simd
from edgekv.kernels.cpu.codes import add_row
from edgekv.kernels.cpu.estimated_keys import ESTIMATED_KEYS
from edgekv.kernels.cpu.half import as_float
from edgekv.kernels.cpu.jit import Args, Scalar, fast_jit, jit
from edgekv.kernels.cpu.launch import run
from edgekv.kernels.cpu.loops import (
    Loops,
    address_of,
    chars,
    floats,
    halves,
    ints,
    numbers,
    second_stage_loop,
)
from edgekv.kernels.cpu.masks import at_least, lowest_one
from edgekv.kernels.cpu.planes import AT as KEY
from edgekv.kernels.cpu.planes import parts_of as planes_of
from edgekv.kernels.cpu.refine import (
    PENDING,
    Heads,
    Keys,
    Memory,
    Products,
    Tail,
    Values,
    add_planes,
    add_up,
    correct_scores,
    prepare,
    split_by_weight,
    weigh,
)
from edgekv.kernels.cpu.rotate import rotate_back_row
from edgekv.kernels.cpu.scalar import get, put
from edgekv.kernels.cpu.softmax import fill
from edgekv.types import F32, U8, U16, U64

LANES = simd.LANES
WORD_BITS = 64
LINE = 64
ONE_BIT = np.uint64(1)
ZERO, HALF, MIDDLE_OF_MEANS = np.array([0, 0.5, 8], np.float32)


def encode_planes(x: F32, step: F32, planes: U64, t0: int) -> None:
    run(_encode_tokens, x.shape[0] * x.shape[1], 2 * x.size, (x, step, planes, t0))


class ValueNumbers(NamedTuple):
    """What the loop gets of a codec of values: addresses, and the threshold's float32 bits.

    Behind them comes the address of the heads' counts (`Loops.counts`).
    """

    top: int
    low: int
    scale: int
    means: int
    mean_scale: int
    fine: int  # of the keys
    threshold: int


VALUE = ValueNumbers(*range(len(ValueNumbers._fields)))  # where each stands
COUNTS = len(VALUE)


@second_stage_loop
def _second_stage(
    key_store: int,
    value_store: int,
    prepared: int,
    p: int,
    gap: int,
    rows: int,
    n: int,
    g: int,
    t0: int,
    t1: int,
    out: int,
    change: int,
    scratch: int,
) -> None:
    """`reference.gather.attend_planes`, then the others as their block's mean."""
    k, v = numbers(key_store), numbers(value_store)
    n_blocks, width = get(k, KEY.n_blocks), get(k, KEY.width)
    n_heads, capacity = rows // n, n_blocks * BLOCK
    blocks = (t1 + BLOCK - 1) // BLOCK - t0 // BLOCK
    _, rotated, rounded, _, _, _ = planes_of(prepared, rows, width)
    keys = Keys(chars(get(k, KEY.planes)), halves(get(k, KEY.scale)), chars(get(v, VALUE.fine)))
    values = Values(chars(get(v, VALUE.top)), chars(get(v, VALUE.low)), halves(get(v, VALUE.scale)))
    places = _places(scratch, rows, n_heads, width, n_blocks)
    sums, tail, chosen, weights = floats(places[0]), floats(places[1]), ints(places[2]), floats(places[3])
    fill(sums, 0, rows * width, ZERO)
    threshold, base = np.int32(get(v, VALUE.threshold)).view(np.float32), g * capacity
    n_read_all = n_full_all = 0
    for j in range(n):
        memory = Memory(chosen, 0, weights, 0, floats(places[4]), 0)
        products, tail_of = Products(chars(places[5]), 0), Tail(tail, blocks, t0 // BLOCK)
        chances = j * gap - t0  # column of token 0, of the first head
        heads = Heads(floats(p), chances, n * gap, n_heads, j, n, width)
        key_scale = get(floats(get(k, KEY.key_scale)), g)
        prepare(floats(rotated), floats(rounded), key_scale, heads, memory, products)
        n_found = 0
        for block in range(t0 // BLOCK, (t1 + BLOCK - 1) // BLOCK):
            start, end = max(t0, block * BLOCK), min(t1, (block + 1) * BLOCK)
            for r in range(n_heads):
                mass = add_up(floats(p), chances + r * n * gap + start, end - start)
                put(tail, (j + r * n) * blocks + block - t0 // BLOCK, mass)
            for t in range(start, end, LANES):
                bits = np.uint64(0)
                for r in range(n_heads):
                    bits |= _at_least(floats(p), chances + r * n * gap + t, end - t, threshold)
                while bits:
                    token = t + lowest_one(bits)
                    bits &= bits - ONE_BIT
                    _prefetch(keys, values, base + token, width)
                    put(chosen, n_found, np.int32(token))
                    n_found += 1
            if n_found > PENDING - BLOCK or block == (t1 - 1) // BLOCK:
                correct_scores(n_found, base, heads, memory, products, keys)
                weigh(n_found, heads, memory, floats(change))
                n_pairs, n_whole = split_by_weight(n_found, base, threshold, heads, memory, values, tail_of)
                add_planes(n_pairs, n_whole, base, heads, memory, values, sums)
                n_full_all += n_whole
                n_read_all += n_found
                n_found = 0
    put(numbers(get(v, COUNTS)), 3 * g, n_read_all)
    put(numbers(get(v, COUNTS)), 3 * g + 1, n_full_all)
    first = g * n_blocks + t0 // BLOCK
    means, mean_scale = chars(get(v, VALUE.means)), halves(get(v, VALUE.mean_scale))
    _add_means(tail, rows, blocks, means, mean_scale, first, width, weights, sums)
    head_dim, matrix, inverse = get(k, KEY.head_dim), floats(get(k, KEY.matrix)), floats(get(k, KEY.inverse))
    for m in range(rows):
        rotate_back_row(
            *(sums, m * width, width, matrix, inverse, get(k, KEY.is_hadamard)),
            *(floats(out), m * head_dim, head_dim),
        )


def _places_of(scratch: int, rows: int, n_heads: int, width: int, n_blocks: int) -> tuple[int, ...]:
    """Where the second stage keeps its sums, tails, chosen tokens, weights, products; and the end of all."""
    tail = scratch + 4 * rows * width
    chosen = tail + 4 * rows * n_blocks
    weights = chosen + 12 * PENDING
    near = weights + 4 * (4 * n_heads + 1) * PENDING
    products = near + 4 * (2 * n_heads + 2 * width)
    products += -products % LINE
    return scratch, tail, chosen, weights, near, products, products + (n_heads + 1) * 4 * width


_places = jit(_places_of)


@fast_jit
def _add_means(
    tail: F32, rows: int, blocks: int, means: U8, scale: U16, first: int, width: int, weights: F32, out: F32
) -> None:
    """out (rows, width) += tail (rows, blocks) times the means of blocks, in 4 bits, from ``first`` on."""
    for m in range(rows):
        for b in range(0, blocks, BLOCK):
            n, total = min(BLOCK, blocks - b), ZERO
            for i in range(n):
                weight = get(tail, m * blocks + b + i) * as_float(get(scale, first + b + i))
                put(weights, i, weight)
                total += weight
            for d in range(m * width, (m + 1) * width):
                put(out, d, get(out, d) - MIDDLE_OF_MEANS * total)
            code = (first + b) * (width // 2)
            add_row((0, 1), weights, 0, n, width, means, code, width // 2, out, m * width)


def _store_numbers(codec: Any) -> ValueNumbers:
    arrays = {name: address_of(codec.arrays[name]) for name in ("top", "low", "scale", "means", "mean_scale")}
    threshold = int(np.float32(codec.threshold).view(np.int32))
    return ValueNumbers(**arrays, fine=address_of(codec.keys.arrays["fine"]), threshold=threshold)


def _scratch_bytes(codec: Any, rows: int) -> int:
    n_blocks = codec.capacity // BLOCK
    end: int = _places_of(0, rows, rows, codec.keys.width, n_blocks)[-1]
    return end + LINE


LOOPS = {
    "plane_keys": ESTIMATED_KEYS,
    "plane_values": Loops(_store_numbers, second_stage=_second_stage, scratch=_scratch_bytes, counts=True),
}


@jit
def _encode_tokens(first: int, last: int, args: Args) -> None:
    x, step, planes, t0 = args
    (_, n, width), (capacity, n_planes, n_words) = x.shape, planes.shape[1:]
    x, step, planes = x.reshape(-1), step.reshape(-1), planes.reshape(-1)
    for item in range(first, last):
        target = (item // n * capacity + t0 + item % n) * n_planes * n_words
        size = get(step, item)
        for _ in range(n_planes):
            for w in range(n_words):
                word = np.uint64(0)
                start = item * width + w * WORD_BITS
                for bit in range(0, WORD_BITS, LANES):
                    word |= simd.load_signs(x, start + bit) << np.uint64(bit)
                put(planes, target, word)
                target += 1
                for d in range(start, start + WORD_BITS):
                    element = get(x, d)
                    put(x, d, element - size if element >= ZERO else element + size)
            size *= HALF


@jit
def _at_least(p: F32, start: int, length: int, threshold: Scalar) -> Scalar:
    """`at_least` for the first LANES of `length` elements."""
    if length >= LANES:
        return at_least(p, start, threshold)
    bits = np.uint64(0)
    for i in range(length):
        if get(p, start + i) >= threshold:
            bits |= ONE_BIT << np.uint64(i)
    return bits


@fast_jit
def _prefetch(keys: Keys, values: Values, stored: int, width: int) -> None:
    """Asks for what `correct_scores` and `add_planes` will read, but keys' signs and the lower value planes."""
    (_, _, fine), (top, _, _) = keys, values
    for i in range(0, 3 * width // 8, LINE):
        simd.prefetch(fine, stored * 3 * width // 8 + i)
    for i in range(0, 2 * width // 8, LINE):
        simd.prefetch(top, stored * 2 * width // 8 + i)
