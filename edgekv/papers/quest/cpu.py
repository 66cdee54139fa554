"""Scores of Quest's index on the CPU: products of split queries with the bounds of pages."""

import numpy as np

from edgekv.codecs.f16 import cpu as f16
from edgekv.kernels.cpu.loops import CpuCodec, address_of, floats, int64s, prepare_loop
from edgekv.kernels.cpu.scalar import get, maximum, minimum, put

ZERO = np.float32(0)


@prepare_loop
def _split(args: int, q: int, rows: int, g: int, prepared: int) -> None:
    """Writes each query's positive part, which meets the largest keys, and behind it its negative part."""
    width, queries, target = get(int64s(args), 2), floats(q), floats(prepared)
    head_dim = width // 2
    for m in range(rows):
        for d in range(head_dim):
            x = get(queries, m * head_dim + d)
            put(target, m * width + d, maximum(x, ZERO))
            put(target, m * width + head_dim + d, minimum(x, ZERO))


KERNELS = {
    "page_index": CpuCodec(
        lambda index: (address_of(index.arrays["bounds"]), index.n_blocks, 2 * index.head_dim),
        score=f16.KERNELS["f16"].score,
        prepare=_split,
        prepared=lambda index, rows: 4 * rows * 2 * index.head_dim,
    )
}
