"""The part of `edgekv.kernels.contract` about integers of 8, 4 or 2 bits with linear scales.

Shapes and token ranges are those of `attention`, beside this.

The width is implied by the shapes: a token's
codes take n_bytes = D * bits / 8 bytes, and byte j holds elements j, j + n_bytes, j + 2 * n_bytes, ... from its
low bits up. Scales are float16 bits. x must be finite.
"""

from typing import Protocol

from edgekv.types import F32, U8, U16


class IntKernels(Protocol):
    """What a backend provides for caches of plain integers."""

    def encode_sym(self, x: F32, codes: U8, scale: U16, t0: int) -> None:
        """Stores x (G, n, D) at tokens t0.. as round(x / scale) + middle, symmetric, 8 or 4 bits wide.

        codes (G, blocks, n_bytes, B): token t lies at [:, t // B, :, t % B]; B = 32 puts tokens next to each other
        (keys), B = 1 bytes (values). scale (G, cap): the token's largest magnitude over top = 2 ** (bits - 1) - 1,
        rounded up to float16. The levels are -top..top, halves rounded to even; middle = 2 ** (bits - 1). A token
        of zeros has scale 0 and decodes to zeros: what is read is (code - middle) * scale.
        """
