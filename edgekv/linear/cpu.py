"""Which backend of the linear layers this machine's cores run a weight format with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.linear.formats import WeightFormat
from edgekv.linear.packed import PackedLinear

if TYPE_CHECKING:
    from edgekv.linear.onnx import OrtLinear


def cpu_linear(form: WeightFormat) -> type[OrtLinear] | type[PackedLinear]:
    """onnxruntime's products of float32, or ours of packed weights."""
    if form.bits < 32:
        return PackedLinear
    from edgekv.linear.onnx import OrtLinear  # takes 0.1 s to import

    return OrtLinear
