"""The loop that decodes bf16 on a CPU; Numba compiles it at its first use on a machine.

edgekv calls it for a tile of tokens, which it then scores or sums in the first-level cache. All arguments are
integers: ``args`` is the address of what `KERNELS` returns for a codec, ``to`` that of the result.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgekv.plugin import loops, scalar, tile

get, put = scalar.get, scalar.put
halves, int64s, words32 = loops.halves, loops.int64s, loops.words32


@tile.decode_loop
def decode(args: int, g: int, t: int, n: int, to: int, scratch: int) -> None:
    """Decodes tokens t..t + n of KV head g to (n, head_dim), float32."""
    x = int64s(args)
    upper, capacity, head_dim = halves(get(x, 0)), get(x, 1), get(x, 2)
    values, start = words32(to), (g * capacity + t) * head_dim
    for i in range(n * head_dim):
        put(values, i, np.uint32(get(upper, start + i)) << np.uint32(16))


def args_of(codec: Any) -> tuple[int, int, int]:
    return loops.address_of(codec.arrays["upper"]), codec.capacity, codec.head_dim


KERNELS = {"bf16": tile.tiled(args_of, decode)}
