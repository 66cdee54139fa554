"""Weight formats of matrices and of models: the arrays of each, hence exact bytes.

How codes are made and read: `edgekv.weights.integers`, `edgekv.weights.gaussian` and, of the blocks of GGUF files,
`edgekv.kernels.cpu.blocks`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from edgekv.checkpoint.quantized import E2M1_DOUBLED
from edgekv.checkpoint.tensors import to_float32
from edgekv.errors import ConfigError
from edgekv.kernels.cpu.blocks import BLOCK_WEIGHTS, BLOCKS
from edgekv.kernels.weight_codes import CODEBOOKS, ROTATED_INPUTS, code_of_zero, level_tables
from edgekv.models.architecture import Architecture, Linear
from edgekv.types import F32, I8, Array
from edgekv.weights import gaussian, integers

Specs = dict[str, tuple[str, tuple[int, ...]]]
ROUTER = ".router"
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1}


class FormatRows(NamedTuple):
    """Rows of one format, ``rows`` of each expert or of the matrix (1: all); array names begin with ``prefix``."""

    form: WeightFormat
    rows: int
    prefix: str

    def select(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Returns the arrays (rows, ...) of these rows among those of the matrix, named as by `form.arrays`."""
        return {key.removeprefix(self.prefix): x for key, x in arrays.items() if key.startswith(self.prefix)}


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """How a matrix of like rows is stored: ``bits`` per weight, one float32 scale per ``block`` inputs (0: none).

    zeros: each block stores its zero point, the code that means 0; otherwise it is 2 ** (bits - 1). offsets: each
    block stores a float32 that is added to scale * code. e2m1: codes are floating-point numbers (`E2M1_DOUBLED`).
    rotated: codes are those of `edgekv.weights.gaussian`, with bfloat16 scales. kept: rows are the bytes that a
    GGUF file has, blocks of the type of that name (`BLOCKS`).
    """

    name: str
    bits: int
    block: int
    zeros: bool = False
    offsets: bool = False
    e2m1: bool = False
    rotated: bool = False
    kept: bool = False

    def n_blocks(self, columns: int) -> int:
        """Returns the number of blocks of a row."""
        return -(-columns // self.block)

    @property
    def pieces(self) -> tuple[FormatRows, ...]:
        """The rows by format: all of them have this one."""
        return (FormatRows(self, 1, ""),)

    def arrays(self, rows: int, columns: int) -> Specs:
        """Returns dtype and shape of the arrays that store a linear layer's weights (rows, columns), by name."""
        if self.bits == 32:
            return {"weight": ("F32", (rows, columns))}
        blocks = self.n_blocks(columns)
        if self.kept:
            return {"blocks": ("U8", (rows, blocks * BLOCKS[self.name].n_bytes))}
        codes = rows, blocks, self.block * self.bits // 8
        arrays: Specs = {"codes": ("U8", codes), "scales": ("BF16" if self.rotated else "F32", (rows, blocks))}
        if self.zeros:
            arrays["zeros"] = ("U8", (rows, blocks))
        if self.offsets:
            arrays["offsets"] = ("F32", (rows, blocks))
        return arrays

    def dequantize(self, arrays: Mapping[str, Array], columns: int) -> F32:
        """Returns the weights (rows, columns) float32 that arrays with the names of `arrays` stand for."""
        if self.bits == 32:
            return to_float32(arrays["weight"])
        if self.kept:
            return BLOCKS[self.name].weights(arrays["blocks"])
        if self.rotated:
            return gaussian.dequantize(arrays["codes"], arrays["scales"], self.bits, columns)
        return integers.dequantize(arrays, self.bits, columns, e2m1=self.e2m1)

    def quantize(self, weight: F32) -> dict[str, Array]:
        """Quantizes weights (rows, columns) to ``codes`` and ``scales``, shaped as by `arrays`.

        Where the format has zeros or offsets, the caller adds them: the zero point is `code_of_zero`.

        Raises ValueError for f32 and for kept and e2m1 formats, which are only taken over.
        """
        if self.bits == 32 or self.kept or self.e2m1:
            raise ValueError(f"weights can't be quantized to {self.name}; accepted are {', '.join(WEIGHTS[1:])}")
        if self.rotated:
            codes, scales = gaussian.quantize(weight, self.bits)
        else:
            codes, scales = integers.quantize(weight, self.bits, self.block)
        return {"codes": codes, "scales": scales}

    def fits(self, linear: Linear) -> bool:
        """Returns whether the format can store a linear layer; kept ones take rows of whole blocks alone."""
        return not self.kept or linear.columns % BLOCK_WEIGHTS == 0

    def levels(self) -> I8:
        """Returns the numbers that codes stand for, times a block's scale."""
        if self.rotated:
            return level_tables(self.bits)
        return E2M1_DOUBLED if self.e2m1 else (np.arange(1 << self.bits) - code_of_zero(self.bits)).astype(np.int8)


@dataclasses.dataclass(frozen=True)
class MixedFormat:
    """How a matrix is stored whose rows alternate between formats, e.g. of each expert 256 of Q2_K, 256 of IQ3_S.

    Rows of one format are stored together; their arrays' names begin with the format's index: ``0.blocks``.
    """

    name: str
    pieces: tuple[FormatRows, ...]

    def fits(self, linear: Linear) -> bool:
        """Returns whether the pieces, of whole blocks, are the rows of the layer or of each of its experts."""
        rows = sum(piece.rows for piece in self.pieces) * max(1, linear.n_experts)
        return rows == linear.rows and all(piece.form.fits(linear) for piece in self.pieces)

    def arrays(self, rows: int, columns: int) -> Specs:
        """Returns dtype and shape of the arrays, as `WeightFormat.arrays` does."""
        n = rows // sum(piece.rows for piece in self.pieces)  # of experts
        specs = ((piece.prefix, piece.form.arrays(n * piece.rows, columns)) for piece in self.pieces)
        return {f"{prefix}{key}": spec for prefix, arrays in specs for key, spec in arrays.items()}

    def dequantize(self, arrays: Mapping[str, Array], columns: int) -> F32:
        """Returns the weights (rows, columns) float32 that the arrays stand for."""
        decoded = (p.form.dequantize(p.select(arrays), columns).reshape(-1, p.rows, columns) for p in self.pieces)
        return np.concatenate(list(decoded), axis=1).reshape(-1, columns)


MatrixFormat = WeightFormat | MixedFormat


def matrix_format(name: str) -> MatrixFormat:
    """Returns the format named q4, Q2_K*256+IQ3_S*256 or the like. Raises ValueError for what is no name."""
    if name in FORMATS:
        return FORMATS[name]
    pairs = [piece.rpartition("*") for piece in name.split("+")]
    if not all(key in FORMATS and key != "f32" and re.fullmatch("[1-9][0-9]*", rows) for key, _, rows in pairs):
        raise ValueError(f"unknown formats among {name}")
    pieces = (FormatRows(FORMATS[key], int(rows), f"{i}.") for i, (key, _, rows) in enumerate(pairs))
    return MixedFormat(name, tuple(pieces))


@dataclasses.dataclass(frozen=True)
class ModelFormat:
    """Which format each matrix of a model has: `linears` gives it; if that is empty, all have the format ``name``.

    linears: each linear layer and the name of its format (`matrix_format`); ``name`` is then only a label.
    """

    name: str
    linears: tuple[tuple[str, str], ...] = ()
    _names = functools.cached_property[dict[str, str]](lambda self: dict(self.linears))

    def of(self, linear: str) -> MatrixFormat:
        """Returns the format of one linear layer; f32 for a router, whose error could choose other experts."""
        if linear.endswith(ROUTER):
            return FORMATS["f32"]
        return matrix_format(self._names[linear] if self.linears else self.name)


FORMATS = {
    form.name: form
    for form in (
        WeightFormat("f32", 32, 0),
        WeightFormat("int8", 8, 128),
        WeightFormat("int8-32", 8, 32),
        WeightFormat("int4", 4, 128),
        WeightFormat("int4-32", 4, 32),
        WeightFormat("int4-zeros", 4, 128, zeros=True),
        WeightFormat("int4-32-zeros", 4, 32, zeros=True),
        WeightFormat("int4-offsets", 4, 128, offsets=True),  # in the memory of a GPU
        WeightFormat("int4-32-offsets", 4, 32, offsets=True),
        WeightFormat("fp4-32", 4, 32, e2m1=True),
        *(WeightFormat(f"q{bits}", bits, ROTATED_INPUTS, rotated=True) for bits in CODEBOOKS),
        *(WeightFormat(name, kind.bits, BLOCK_WEIGHTS, kept=True) for name, kind in BLOCKS.items()),
    )
}
TAKEN_OVER = "zeros", "offsets", "e2m1", "kept"
WEIGHTS = tuple(name for name, form in FORMATS.items() if not any(getattr(form, kind) for kind in TAKEN_OVER))
"""Formats in which edgekv itself quantizes; the others are only taken over from checkpoints."""
OFFERED = ("f32", "int8", "q5", "q4", "q3", "q2")
"""The formats that `--help` offers; the others of WEIGHTS take more bytes at the same loss."""
ALSO = f"also {', '.join(name for name in WEIGHTS if name not in OFFERED)}"

HEAD = ",head="
MEAN = re.compile(r"q(2\.[1-9]|[34]\.[0-9])")


def mean_bits(name: str) -> float | None:
    """Returns the mean bits of codes that a name such as q3.6 asks for, or None for other names."""
    found = MEAN.fullmatch(name)
    return float(found[1]) if found else None


def allocate_layer_bits(needs: Mapping[str, float], sizes: Mapping[str, int], mean: float) -> dict[str, int]:
    """Returns the bits of each linear layer's codes: ``mean`` of all weights at most, 2 or more.

    needs: each layer's KL at one common number of bits; at other bits it is scaled by a Gaussian's squared error
    (`gaussian.SQUARED_ERRORS`). sizes: its number of weights. Each next bit goes where it gains most for its size.
    """
    errors, least = gaussian.SQUARED_ERRORS, min(CODEBOOKS)
    bits, room = dict.fromkeys(needs, least), (mean - least) * sum(sizes[name] for name in needs)
    gains = {n: errors[n] - errors[n + 1] for n in CODEBOOKS if n + 1 in CODEBOOKS}  # of one more bit than n
    upgrades = ((needs[name] * gains[n] / sizes[name], n, name) for name in needs for n in gains)
    for _, n, name in sorted(upgrades, key=lambda upgrade: -upgrade[0]):
        if bits[name] == n and sizes[name] <= room:
            bits[name], room = n + 1, room - sizes[name]
    return bits


def weight_format(name: str, arch: Architecture, stored: ModelFormat | None = None) -> ModelFormat:
    """Returns the named format; ``auto`` is f32 below 100M linear parameters, int8 below 1B, else q4.

    ``NAME,head=NAME`` gives the language-model head another one. stored: the format of a file that is quantized
    already, which is meant by ``auto`` and by its name. Raises ConfigError (field weights).
    """
    base, separator, head = name.partition(HEAD)
    if separator and mean_bits(base):
        what, way = "a text decides the head's bits, too", f"leave {HEAD}NAME out"
        raise ConfigError(what, field="weights", value=name, advice=way)
    form = _named(base, arch, stored)
    if not separator or head == form.of("head").name:
        return form
    if head not in WEIGHTS:
        accepted = [f"{form.name}{HEAD}{offered}" for offered in OFFERED]
        raise ConfigError("unknown", field="weights", value=name, accepted=accepted, advice=ALSO)
    linears = {linear: form.of(linear).name for linear in arch.linears()} | {"head": head}
    return ModelFormat(f"{form.name}{HEAD}{head}", tuple(linears.items()))


def _named(name: str, arch: Architecture, stored: ModelFormat | None) -> ModelFormat:
    if stored is not None and name in ("auto", stored.name):
        return stored
    if name == "auto":
        elements = sum(linear.n_elements for linear in arch.linears().values())
        name = "f32" if elements < 100e6 else "int8" if elements < 1e9 else "q4"
    if mean_bits(name):
        way = f"run `edgekv quantize MODEL --weights {name} --calibrate --output FOLDER`, and give that as MODEL"
        what = "can't be chosen without a text, which decides each matrix's bits"
        raise ConfigError(what, field="weights", value=name, advice=way)
    if name not in WEIGHTS:
        accepted, advice = ("auto", *OFFERED), f"{ALSO}, and q2.1 to q4.9 in `edgekv quantize --calibrate`"
        raise ConfigError("unknown", field="weights", value=name, accepted=accepted, advice=advice)
    return ModelFormat(name)


def store_specs(arch: Architecture, form: ModelFormat, table_dtypes: Mapping[str, str]) -> Specs:
    """Returns the store's tensors in file order: name -> (safetensors dtype, shape); tables keep their dtypes."""
    specs: Specs = {}
    for name, linear in arch.linears().items():
        arrays = form.of(name).arrays(linear.rows, linear.columns)
        specs |= {f"{name}.{key}": spec for key, spec in arrays.items()}
        if linear.biases:
            specs[f"{name}.bias"] = ("F32", (linear.rows,))
    specs |= {name: ("F32", (size,)) for name, (_, size) in arch.vectors().items()}
    specs |= {name: ("F32", shape) for name, (_, shape) in arch.arrays().items()}
    return specs | {name: (table_dtypes[name], shape) for name, (_, shape) in arch.tables().items()}


def specs_bytes(specs: Specs) -> int:
    """Returns the bytes of the tensors' data."""
    return sum(ITEM_BYTES[dtype] * math.prod(shape) for dtype, shape in specs.values())


def token_bytes(arch: Architecture, specs: Specs) -> int:
    """Returns the bytes that one decode step reads: all but tables, of which it reads a row, and idle experts."""
    read = {name: spec for name, spec in specs.items() if name not in arch.tables()}
    return specs_bytes(read) - idle_bytes(arch, specs)


def idle_bytes(arch: Architecture, specs: Specs) -> int:
    """Returns the bytes of the experts that one token does not go through."""
    nbytes = 0
    for name, linear in arch.linears().items():
        if linear.n_experts:
            of_all = specs_bytes({key: spec for key, spec in specs.items() if key.startswith(f"{name}.")})
            nbytes += of_all // linear.n_experts * (linear.n_experts - arch.active_experts)
    return nbytes
