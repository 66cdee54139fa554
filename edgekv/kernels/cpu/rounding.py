"""How encoders round: to whole numbers, halves to even, and scales up to the next float16."""

import numpy as np

from edgekv.kernels.contract.attention import LARGEST_F16
from edgekv.kernels.cpu.half import as_float, float_to_half
from edgekv.kernels.cpu.jit import Scalar, jit
from edgekv.kernels.cpu.scalar import minimum

# x + ROUND has in its low bits a float32 |x| < 2**22, rounded to an integer, halves to even; - ROUND: as a float.
ROUND = np.float32(1.5 * 2**23)


@jit
def round_to_even(x: Scalar) -> Scalar:
    """The whole number next to a float32 |x| < 2**22, halves to even."""
    return x + ROUND - ROUND


@jit
def round_up_to_half(x: Scalar) -> Scalar:
    """Bits of the smallest float16 not below x >= 0, or of the largest float16."""
    x = minimum(x, LARGEST_F16)
    bits = float_to_half(x)
    return np.uint16(bits + 1) if as_float(bits) < x else bits
