"""Which loops read which kind of codec."""

from edgekv.kernels.cpu import dense
from edgekv.kernels.cpu.loops import Loops

KEYS: dict[str, Loops] = {
    "f16": dense.F16,
    "f32": dense.F32_ROWS,
}

VALUES: dict[str, Loops] = {
    "f16": dense.F16,
    "f32": dense.F32_ROWS,
}

CHOSEN: dict[str, tuple[Loops, Loops]] = {}
"""For segments of which only chosen tokens are read, by the kind of the keys: loops of keys and of values."""
