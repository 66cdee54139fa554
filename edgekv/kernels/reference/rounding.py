"""How encoders round scales: up to the next float16."""

import numpy as np

from edgekv.kernels.contract.attention import LARGEST_F16
from edgekv.types import F32, U16


def round_up_to_f16(x: F32) -> U16:
    """Bits of the smallest float16 not below x >= 0, or of the largest float16."""
    x = np.minimum(x, LARGEST_F16)
    half = x.astype(np.float16)
    bits: U16 = half.view(np.uint16) + (half.astype(np.float32) < x).astype(np.uint16)
    return bits
