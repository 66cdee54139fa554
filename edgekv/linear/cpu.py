"""Which backend of the linear layers this machine's cores run a weight format with."""

from __future__ import annotations

from edgekv.linear.formats import WeightFormat
from edgekv.linear.onnx import OrtLinear
from edgekv.linear.packed import PackedLinear


def cpu_linear(form: WeightFormat) -> type[OrtLinear] | type[PackedLinear]:
    """onnxruntime's products of float32, or ours of packed weights."""
    return OrtLinear if form.bits == 32 else PackedLinear
