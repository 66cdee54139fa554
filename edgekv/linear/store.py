"""The weight store: a folder that `store_builder.py` makes once, mapped at every later start, copied freely.

store.json            format, weight format, the checkpoint's identity, its config.json, the next file's hash
weights.safetensors   codes, scales, norms, biases and the embedding table
*.onnx                of float32 weights the blocks' graphs, which point into weights.safetensors
tokenizer files       copied from the checkpoint
"""

from __future__ import annotations

import os
import pathlib
from typing import Any, Literal

import msgspec
import numpy.typing as npt

from edgekv.cache_folder import cache_root
from edgekv.checkpoint.tensors import TensorFile, to_float32
from edgekv.errors import CheckpointError
from edgekv.files import read_object
from edgekv.linear.formats import WEIGHTS, WeightFormat, per_linear_format, specs_bytes, store_specs, token_bytes
from edgekv.linear.quantize import dequantize, unpack_zeros
from edgekv.linear.weights import Ids
from edgekv.models import architecture
from edgekv.schema import read
from edgekv.types import F32

FORMAT = 1
WEIGHTS_FILE = "weights.safetensors"


def is_store(path: pathlib.Path) -> bool:
    """Whether the folder is a weight store."""
    return os.path.isfile(path / "store.json")


def default_folder(identity: str, form: WeightFormat) -> pathlib.Path:
    """Where `run` keeps the store of a checkpoint: under XDG_CACHE_HOME (~/.cache)."""
    return cache_root() / "stores" / f"{identity}-{form.name}-v{FORMAT}"


FormatName = Literal[
    "f32", "int8", "int8-32", "int4", "int4-32", "int4-zeros", "int4-32-zeros", "int4-32-offsets", "fp4-32"
]


class StoreFile(msgspec.Struct):
    """store.json. linears: formats of FORMATS. calibration: with what text the weights were rounded.

    sha256: `content_hash` of the weights' file; None: the store was made before there was one.
    """

    format: int
    weights: str
    identity: str
    config: dict[str, Any]
    linears: dict[str, FormatName] | None = None  # FORMATS
    calibration: str | None = None
    sha256: str | None = None


class WeightStore:
    """An opened store: weights by name, dequantized on request. `OrtLinear` and `PackedLinear` read it."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        hint = "quantize the model again"
        try:
            file = read(read_object(folder / "store.json"), StoreFile, "it", hint, CheckpointError)
        except (ValueError, CheckpointError) as error:
            raise CheckpointError(f"{folder}/store.json: not a weight store ({error}); {hint}") from error
        version, name, linears = file.format, file.weights, file.linears
        self._identity, self._sha256 = file.identity, file.sha256
        self.config, self.calibration = file.config, file.calibration
        if version != FORMAT or (name not in WEIGHTS and not linears):
            raise CheckpointError(
                f"{folder}: store format {version} with weights {name!r}, this edgekv reads format {FORMAT}; "
                f"run `edgekv quantize` again"
            )
        self.arch = architecture(self.config)
        if linears and linears.keys() != self.arch.linears().keys():
            raise CheckpointError(f"{folder}/store.json: its linears are not those of its config; {hint}")
        self.form = per_linear_format(name, linears) if linears else WEIGHTS[name]
        self._file = TensorFile(folder / WEIGHTS_FILE)
        self.table_dtypes = {name: self._file.info(name).dtype for name in self.arch.tables()}
        specs = store_specs(self.arch, self.form, self.table_dtypes)
        for tensor, (kind, shape) in specs.items():
            info = self._file.info(tensor)
            if (info.dtype, info.shape) != (kind, shape):
                raise CheckpointError(
                    f"{folder}/{WEIGHTS_FILE}: {tensor} is {info.dtype} {list(info.shape)}, expected {kind} "
                    f"{list(shape)}; quantize the model again"
                )
        self.nbytes = specs_bytes(specs)
        self.token_bytes = token_bytes(self.arch, specs)
        self._linears = self.arch.linears()

    @property
    def identity(self) -> str:
        """The checkpoint's. CheckpointError where the weights are not those that were made of it."""
        if self._sha256 not in (None, self._file.content_hash()):
            raise CheckpointError(
                f"{self.folder}/{WEIGHTS_FILE}: was changed after store.json was written; quantize the model again"
            )
        return self._identity

    def raw(self, tensor: str) -> npt.NDArray[Any]:
        """A tensor of the file as it is stored, by its name in `store_specs`; mapped, not read."""
        return self._file.array(tensor)

    def advise(self, tensor: str, advice: int, first: int = 0, n: int | None = None) -> None:
        """As `TensorFile.advise`."""
        self._file.advise(tensor, advice, first, n)

    def matrix(self, name: str) -> F32:
        """(rows, columns) float32, dequantized: what the codes stand for."""
        form = self.form.of(name)
        if form.bits == 32:
            return to_float32(self._file.array(f"{name}.weight"))
        codes, scales = (self._file.array(f"{name}.{part}") for part in ("codes", "scales"))
        zeros = self._file.array(f"{name}.zeros") if form.zeros else None
        offsets = self._file.array(f"{name}.offsets") if form.offsets else None
        columns = self._linears[name].columns
        return dequantize(
            codes, scales, form.bits, form.block, columns, zeros=zeros, offsets=offsets, e2m1=form.e2m1
        )

    def shift(self, name: str) -> F32 | None:
        """What zero points or offsets add to the weights of each block, (rows, blocks) float32; None: nothing."""
        form = self.form.of(name)
        if form.offsets:
            return to_float32(self._file.array(f"{name}.offsets"))
        if not form.zeros:
            return None
        scales: F32 = self._file.array(f"{name}.scales")
        return -unpack_zeros(self._file.array(f"{name}.zeros"), scales.shape[1]) * scales

    def bias(self, name: str) -> F32 | None:
        """(rows,) float32; None: the linear has none."""
        return to_float32(self._file.array(f"{name}.bias")) if self._linears[name].biases else None

    def vector(self, name: str) -> F32:
        """(size,) float32."""
        return to_float32(self._file.array(name))

    def array(self, name: str) -> F32:
        """float32: one of `Architecture.arrays`."""
        return to_float32(self._file.array(name))

    def rows(self, table: str, ids: Ids) -> F32:
        """Rows (n, hidden) float32 of the table ``embed`` or ``positions``."""
        return to_float32(self._file.array(table)[ids])
