"""Quest's index: the largest and the smallest key of a page, channel by channel."""

import numpy as np

from edgekv.kernels.cpu import rows
from edgekv.kernels.cpu.compile import Args, jit
from edgekv.kernels.cpu.launch import run
from edgekv.kernels.cpu.loops import Loops, address_of, floats, numbers, prepare_loop
from edgekv.kernels.cpu.scalar import as_float, float_to_half, get, maximum, minimum, put
from edgekv.types import U16

ZERO = np.float32(0)


def encode_pages(keys: U16, page: int, bounds: U16, b0: int, b1: int) -> None:
    n_items = keys.shape[0] * (b1 - b0)
    args = keys, page, bounds, b0, b1
    run(_encode_items, n_items, n_items * page * keys.shape[2], args)


@jit
def _encode_items(first: int, last: int, args: Args) -> None:
    keys, page, bounds, b0, b1 = args
    (_, capacity, head_dim), n_pages = keys.shape, bounds.shape[1]
    keys, bounds = keys.reshape(-1), bounds.reshape(-1)
    for item in range(first, last):
        g, b = item // (b1 - b0), b0 + item % (b1 - b0)
        key, bound = (g * capacity + b * page) * head_dim, (g * n_pages + b) * 2 * head_dim
        for d in range(2 * head_dim):  # float16 bits of the first token, twice
            put(bounds, bound + d, get(keys, key + d % head_dim))
        for t in range(1, page):
            for d in range(head_dim):
                x = as_float(get(keys, key + t * head_dim + d))
                high, low = as_float(get(bounds, bound + d)), as_float(get(bounds, bound + head_dim + d))
                put(bounds, bound + d, float_to_half(maximum(high, x)))
                put(bounds, bound + head_dim + d, float_to_half(minimum(low, x)))


@prepare_loop
def _split(store: int, q: int, rows: int, g: int, prepared: int) -> None:
    """Each query as its positive part, which meets the largest keys, and its negative part behind it."""
    width, queries, target = get(numbers(store), 2), floats(q), floats(prepared)
    head_dim = width // 2
    for m in range(rows):
        for d in range(head_dim):
            x = get(queries, m * head_dim + d)
            put(target, m * width + d, maximum(x, ZERO))
            put(target, m * width + head_dim + d, minimum(x, ZERO))


LOOPS = {
    "page_index": Loops(
        lambda index: (address_of(index.arrays["bounds"]), index.n_blocks, 2 * index.head_dim),
        score=rows.LOOPS["f16"].score,
        prepare=_split,
        prepared=lambda index, rows: 4 * rows * 2 * index.head_dim,
    )
}
"""A unit is a page: its score is the product of the split query with its bounds."""
