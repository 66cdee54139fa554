"""Weight formats and what a weight store holds for each: names, dtypes and shapes, hence exact bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from edgekv.checkpoint.tensors import to_float32
from edgekv.errors import ConfigError, unknown
from edgekv.models.architecture import Architecture
from edgekv.types import F32, Array
from edgekv.weights.quantize import dequantize, n_blocks

Specs = dict[str, tuple[str, tuple[int, ...]]]
ROUTER = ".router"
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1}


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """How linear layers are stored: ``bits`` per weight, one float32 scale per ``block`` inputs (0: none).

    zeros: whether each block has a zero point of its own, a whole number; else it is half the range. offsets:
    whether instead a float32 of its own is added to each block. e2m1: whether codes are floating-point numbers
    (`E2M1_DOUBLED` of mxfp4.py).
    """

    name: str
    bits: int
    block: int
    zeros: bool = False
    offsets: bool = False
    e2m1: bool = False

    def arrays(self, rows: int, columns: int) -> Specs:
        """Return what a linear layer's weights (rows, columns) are stored as: dtype and shape by part."""
        if self.bits == 32:
            return {"weight": ("F32", (rows, columns))}
        blocks = n_blocks(columns, self.block)
        codes = rows, blocks, self.block * self.bits // 8
        arrays: Specs = {"codes": ("U8", codes), "scales": ("F32", (rows, blocks))}
        if self.zeros:
            arrays["zeros"] = ("U8", (rows, -(-blocks // 2)))
        if self.offsets:
            arrays["offsets"] = ("F32", (rows, blocks))
        return arrays

    def decode(self, arrays: Mapping[str, Array], columns: int) -> F32:
        """Return the weights (rows, columns) float32 that the arrays of `arrays` stand for."""
        if self.bits == 32:
            return to_float32(arrays["weight"])
        return dequantize(bits=self.bits, block=self.block, columns=columns, e2m1=self.e2m1, **arrays)

    def of(self, linear: str) -> WeightFormat:
        """The format of one linear layer. What chooses experts is exact: a near tie would choose others."""
        return FORMATS["f32"] if linear.endswith(ROUTER) else self


@dataclasses.dataclass(frozen=True)
class PerLinearFormat(WeightFormat):
    """Of several formats: ``linears`` names that of each linear layer, in FORMATS."""

    linears: tuple[tuple[str, str], ...] = ()

    def of(self, linear: str) -> WeightFormat:
        return super().of(linear) if linear.endswith(ROUTER) else FORMATS[dict(self.linears)[linear]]


WEIGHTS: dict[str, WeightFormat] = {
    "f32": WeightFormat("f32", 32, 0),
    "int8": WeightFormat("int8", 8, 128),
    "int8-32": WeightFormat("int8-32", 8, 32),
    "int4": WeightFormat("int4", 4, 128),
    "int4-32": WeightFormat("int4-32", 4, 32),
}


FORMATS = WEIGHTS | {
    "int4-zeros": WeightFormat("int4-zeros", 4, 128, zeros=True),
    "int4-32-zeros": WeightFormat("int4-32-zeros", 4, 32, zeros=True),
    "int4-32-offsets": WeightFormat("int4-32-offsets", 4, 32, offsets=True),
    "fp4-32": WeightFormat("fp4-32", 4, 32, e2m1=True),
}
"""With those that are only taken over from checkpoints, where edgekv itself quantizes without zero points."""

HEAD = ",head="


def per_linear_format(name: str, linears: Mapping[str, str]) -> WeightFormat:
    """The format of linear layers that have one each; name: of all, such as a quantized checkpoint's method."""
    return PerLinearFormat(name, 0, 0, linears=tuple(linears.items()))


def weight_format(name: str, arch: Architecture, own: WeightFormat | None = None) -> WeightFormat:
    """The named format; ``auto`` is f32 below 100M linear parameters, int8 below 1B, else int4.

    ``NAME,head=NAME`` gives the language-model head another one. own: that of a file which is quantized already;
    ``auto`` and its own name keep it. Raises ConfigError (field weights).
    """
    base, separator, head = name.partition(HEAD)
    form = _named(base, arch, own)
    if not separator or head == form.of("head").name:
        return form
    if head not in WEIGHTS:
        raise unknown(ConfigError, "weights", name, [f"{form.name}{HEAD}{each}" for each in WEIGHTS])
    linears = {linear: form.of(linear).name for linear in arch.linears()}
    return per_linear_format(f"{form.name}{HEAD}{head}", linears | {"head": head})


def _named(name: str, arch: Architecture, own: WeightFormat | None) -> WeightFormat:
    if own is not None and name in ("auto", own.name):
        return own
    if name == "auto":
        elements = sum(linear.n_elements for linear in arch.linears().values())
        name = "f32" if elements < 100e6 else "int8" if elements < 1e9 else "int4"
    if name not in WEIGHTS:
        raise unknown(ConfigError, "weights", name, ("auto", *WEIGHTS))
    return WEIGHTS[name]


def store_specs(arch: Architecture, form: WeightFormat, table_dtypes: Mapping[str, str]) -> Specs:
    """Every tensor of the store in file order: name -> (safetensors dtype, shape); tables keep their dtypes."""
    specs: Specs = {}
    for name, linear in arch.linears().items():
        arrays = form.of(name).arrays(linear.rows, linear.columns)
        specs |= {f"{name}.{part}": spec for part, spec in arrays.items()}
        if linear.biases:
            specs[f"{name}.bias"] = ("F32", (linear.rows,))
    for name, (_, size) in arch.vectors().items():
        specs[name] = ("F32", (size,))
    for name, (_, shape) in arch.arrays().items():
        specs[name] = ("F32", shape)
    for name, (_, shape) in arch.tables().items():
        specs[name] = (table_dtypes[name], shape)
    return specs


def specs_bytes(specs: Specs) -> int:
    """Bytes of the tensors' data."""
    return sum(ITEM_BYTES[dtype] * math.prod(shape) for dtype, shape in specs.values())


def token_bytes(arch: Architecture, specs: Specs) -> int:
    """Bytes that one decode step reads: all but the tables, of which it reads a row, and idle experts."""
    read = {name: spec for name, spec in specs.items() if name not in arch.tables()}
    return specs_bytes(read) - idle_bytes(arch, specs)


def idle_bytes(arch: Architecture, specs: Specs) -> int:
    """Bytes of the experts that one token does not go through."""
    nbytes = 0
    for name, linear in arch.linears().items():
        if linear.n_experts:
            of_all = specs_bytes({key: spec for key, spec in specs.items() if key.startswith(f"{name}.")})
            nbytes += of_all // linear.n_experts * (linear.n_experts - arch.active_experts)
    return nbytes
