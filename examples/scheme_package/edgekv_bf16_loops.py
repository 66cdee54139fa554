"""The loop that decodes bf16 on a CPU; Numba compiles it at its first use on a machine.

edgekv calls it for a tile of tokens, which it then scores or sums in the first-level cache. All arguments are
integers: ``numbers`` is the address of what `KERNELS` returns for a codec, ``tile`` that of the result.
"""

from __future__ import annotations

import numpy as np

from edgekv.kernels.cpu.loops import address_of, halves, int64s, words32
from edgekv.kernels.cpu.scalar import get, put
from edgekv.kernels.cpu.tile import decode_loop, tiled


@decode_loop
def decode(numbers: int, g: int, t: int, n: int, tile: int, scratch: int) -> None:
    """Decodes tokens t..t + n of KV head g into tile (n, head_dim), float32."""
    x = int64s(numbers)
    upper, capacity, head_dim = halves(get(x, 0)), get(x, 1), get(x, 2)
    to, start = words32(tile), (g * capacity + t) * head_dim
    for i in range(n * head_dim):
        put(to, i, np.uint32(get(upper, start + i)) << np.uint32(16))


KERNELS = {
    "bf16": tiled(lambda codec: (address_of(codec.arrays["upper"]), codec.capacity, codec.head_dim), decode)
}
