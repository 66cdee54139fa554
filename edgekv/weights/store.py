"""The weight store: a folder that is made once, mapped at every later start, copied freely.

store.json            format, weight format, the checkpoint's identity, its config.json, the next file's hash
weights.safetensors   codes, scales, norms, biases and the embedding table
tokenizer files       copied from the checkpoint
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np

from edgekv.checkpoint.checkpoint import TEXT_FILES
from edgekv.checkpoint.hub import cached_model_name
from edgekv.checkpoint.tensors import Tensors, TensorWriter, hash_spans, to_float32
from edgekv.checks import read_fields
from edgekv.errors import CheckpointError, EdgeKVError
from edgekv.files import atomic_folder, atomic_write, cache_root, read_object
from edgekv.kernels.weight_codes import code_of_zero
from edgekv.machine import format_bytes
from edgekv.models import architecture
from edgekv.types import F32, I64, U8, Array, TaskProgress
from edgekv.weights.checkpoint_weights import CheckpointWeights
from edgekv.weights.formats import WEIGHTS, ModelFormat, matrix_format, specs_bytes, store_specs, token_bytes

FORMAT = 2
WEIGHTS_FILE = "weights.safetensors"
Write = Callable[[str, "tuple[U8, Array] | None"], None]
"""Called with each linear layer's name, in order, and (codes, scales); None: `build` quantizes the layer."""


def is_store(path: pathlib.Path) -> bool:
    """Returns whether the folder is a weight store."""
    return os.path.isfile(path / "store.json")


def default_folder(identity: str, form: ModelFormat) -> pathlib.Path:
    """Returns the folder of a checkpoint's store among this user's caches, under XDG_CACHE_HOME (~/.cache)."""
    return cache_root() / "stores" / f"{identity}-{form.name}-v{FORMAT}"


class StoreFile(msgspec.Struct):
    """The contents of store.json.

    name: the model's, for people. linears: each linear layer's format in FORMATS; None: all have one. calibration:
    the text with which the weights were rounded. sha256: `content_hash` of the weights' file; None: the store is
    older than the field.
    """

    format: int
    weights: str
    identity: str
    config: dict[str, Any]
    name: str | None = None
    linears: dict[str, str] | None = None
    calibration: str | None = None
    sha256: str | None = None


class WeightStore:
    """An opened store: weights by name, dequantized on request. `CpuOps` reads it."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        hint = "quantize the model again"
        try:
            file = read_fields(read_object(folder / "store.json"), StoreFile, "it", hint, CheckpointError)
        except (ValueError, CheckpointError) as error:
            raise CheckpointError(f"{folder}/store.json: not a weight store ({error}); {hint}") from error
        version, name, linears = file.format, file.weights, file.linears
        self._identity, self._sha256 = file.identity, file.sha256
        self.config, self.calibration = file.config, file.calibration
        if version != FORMAT:
            raise CheckpointError(f"{folder}: store format {version}, this edgekv reads format {FORMAT}; {hint}")
        if name not in WEIGHTS and not linears:
            what = f"weights {name!r} are unknown; accepted are {', '.join(WEIGHTS)}"
            raise CheckpointError(f"{folder}/store.json: {what}; {hint}")
        self.arch = architecture(self.config)
        self._linears = self.arch.linears()
        try:
            fits = linears is None or (
                linears.keys() == self._linears.keys()
                and all(matrix_format(linears[key]).fits(linear) for key, linear in self._linears.items())
            )
        except ValueError:
            fits = False
        if not fits:
            raise CheckpointError(f"{folder}/store.json: its linears are not those of its config; {hint}")
        self.form = ModelFormat(name, tuple((linears or {}).items()))
        self._tensors = Tensors.open(folder / WEIGHTS_FILE)
        dtypes = ((name, self._tensors[name].dtype) for name in self.arch.tables())
        self.table_dtypes = {name: dtype if dtype in ("F32", "BF16") else "F16" for name, dtype in dtypes}
        specs = store_specs(self.arch, self.form, self.table_dtypes)
        for tensor, (kind, shape) in specs.items():
            info = self._tensors[tensor]
            if (info.dtype, info.shape) != (kind, shape):
                raise info.error(f"is {info.dtype} {list(info.shape)}, expected {kind} {list(shape)}; {hint}")
        self.nbytes = specs_bytes(specs)
        self.token_bytes = token_bytes(self.arch, specs)

    @property
    def identity(self) -> str:
        """The checkpoint's identity. Raises CheckpointError if the weights were changed after they were made."""
        if self._sha256 not in (None, self._tensors.files[0].content_hash()):
            what = f"{self._tensors.path}: was changed after store.json was written"
            raise CheckpointError(f"{what}; quantize the model again")
        return self._identity

    def raw(self, tensor: str) -> Array:
        """Returns a tensor of the file as it is stored, by its name in `store_specs`; mapped, not read."""
        return self._tensors[tensor].read()

    def advise(self, tensor: str, advice: int, first: int = 0, n: int | None = None) -> None:
        """Tells the system how n rows of a tensor will be read (`Tensor.advise`)."""
        self._tensors[tensor].advise(advice, first, n)

    def matrix(self, name: str) -> F32:
        """Returns a linear layer's weights (rows, columns) float32, dequantized."""
        return self.form.of(name).dequantize(self.arrays(name), self._linears[name].columns)

    def arrays(self, name: str) -> dict[str, Array]:
        """Maps the arrays of a linear layer, named as by `WeightFormat.arrays`."""
        linear = self._linears[name]
        specs = self.form.of(name).arrays(linear.rows, linear.columns)
        return {key: self._tensors[f"{name}.{key}"].read() for key in specs}

    def corrections(self, name: str) -> F32 | None:
        """Returns what zeros or offsets add to scale * (code - code_of_zero), (rows, blocks) float32, or None."""
        arrays, zero = self.arrays(name), code_of_zero(self.form.of(name).pieces[0].form.bits)
        if "offsets" in arrays:
            return to_float32(zero * arrays["scales"] + arrays["offsets"])
        if "zeros" not in arrays:
            return None
        corrections: F32 = (zero - arrays["zeros"].astype(np.float32)) * arrays["scales"]
        return corrections

    def bias(self, name: str) -> F32 | None:
        """Returns the biases (rows,) of a linear, float32, or None where it has none."""
        return to_float32(self._tensors[f"{name}.bias"].read()) if self._linears[name].biases else None

    def array(self, name: str) -> F32:
        """Returns a norm (size,) or one of `Architecture.arrays`, float32."""
        return to_float32(self._tensors[name].read())

    vector = array

    def rows(self, table: str, ids: I64) -> F32:
        """Returns the rows (n, hidden) float32 of the table ``embed`` or ``positions``."""
        return to_float32(self._tensors[table].read()[ids])


class Rounding(Protocol):
    """A way to round weights. `build` calls it once; it calls ``write`` for every linear layer, in order.

    note: what store.json says of it. weights: the checkpoint's, with an identity that depends on the rounding.
    """

    note: str
    weights: CheckpointWeights

    def __call__(self, form: ModelFormat, write: Write) -> None: ...


def open_or_build(weights: CheckpointWeights, form: ModelFormat, progress: TaskProgress | None) -> WeightStore:
    """Opens the checkpoint's store in the default folder, after making it if it isn't there or is unreadable."""
    folder = default_folder(weights.source.identify(progress), form)
    with contextlib.suppress(OSError):  # there is none, or another start has just removed it
        made, store = folder.stat().st_ctime_ns, None
        with contextlib.suppress(EdgeKVError):
            store = WeightStore(folder)
        if store and store.form == form:
            return store
        if folder.stat().st_ctime_ns == made:  # damaged, or of a version that chose other formats
            aside = folder.rename(folder.with_name(f"{folder.name}.partial-{made:x}"))
            shutil.rmtree(aside, ignore_errors=True)
    build(weights, form, folder, progress, shared=True)
    return WeightStore(folder)


def build(
    weights: CheckpointWeights,
    form: ModelFormat,
    folder: pathlib.Path,
    progress: TaskProgress | None,
    beside: Callable[[pathlib.Path], None] | None = None,
    rounding: Rounding | None = None,
    shared: bool = False,
) -> None:
    """Writes the store to ``folder`` in one rename: it is complete or it isn't there.

    shared: accept a store that another process has written there meanwhile. beside(folder) adds files
    before the rename. rounding: rounds with a text; None: each block by itself. Takes memory for the largest
    matrix as it is stored, 0.3 GiB more, and that of a rounding; the checkpoint is mapped. Raises CheckpointError
    when the disk is too small (before or while writing) or the folder can't be written.
    """
    source, specs = weights.source, store_specs(weights.arch, form, weights.table_dtypes)
    try:
        with atomic_folder(folder, is_store if shared else lambda _: False) as partial:
            nbytes, free = specs_bytes(specs), shutil.disk_usage(folder.parent).free
            if free < nbytes * 1.01:
                what = f"the store needs {format_bytes(nbytes)}, the disk has {format_bytes(free)} free"
                hint = "make room, or point XDG_CACHE_HOME (or the output) to a larger disk"
                raise CheckpointError(f"{folder}: {what}; {hint}")
            _write_weights(weights, form, specs, partial / WEIGHTS_FILE, progress, rounding)
            for name in TEXT_FILES:
                if source.tokenizer_folder and (source.tokenizer_folder / name).is_file():
                    shutil.copyfile(source.tokenizer_folder / name, partial / name)
            if beside:
                beside(partial)
            manifest = {"format": FORMAT, "weights": form.name}
            name = cached_model_name(source.path) or source.path.name
            manifest |= {"identity": source.identity, "config": source.config, "name": name}
            if form.linears:
                manifest["linears"] = dict(form.linears)
            if rounding:
                manifest["calibration"] = rounding.note
            with open(partial / WEIGHTS_FILE, "rb") as file:
                manifest["sha256"] = hash_spans(file.fileno(), os.path.getsize(partial / WEIGHTS_FILE), progress)
            atomic_write(partial / "store.json", json.dumps(manifest, indent=1).encode())
    except OSError as error:
        raise CheckpointError(f"{folder}: can't write the store ({error.strerror or error})") from error


def _write_weights(
    weights: CheckpointWeights,
    form: ModelFormat,
    specs: dict[str, tuple[str, tuple[int, ...]]],
    path: pathlib.Path,
    progress: TaskProgress | None,
    rounding: Rounding | None,
) -> None:
    arch, linears = weights.arch, weights.arch.linears()
    total, done = specs_bytes(specs), 0
    with TensorWriter(path, specs, {"weights": form.name}) as writer:

        def write(name: str, array: Array) -> None:
            nonlocal done
            writer.write(name, array)
            done += array.nbytes
            if progress:
                progress("converting" if form.name == "f32" else "quantizing", done, total)

        def write_linear(name: str, rounded: tuple[U8, Array] | None = None) -> None:
            """Writes a linear layer; rounded: codes (rows, blocks, bytes) and scales (rows, blocks)."""
            for key, array in weights.stored_arrays(name, form.of(name), rounded):
                write(f"{name}.{key}", array)
            bias = weights.bias(name)
            if bias is not None:
                write(f"{name}.bias", bias)
            weights.release(name)

        if rounding:
            rounding(form, write_linear)
        else:
            for name in linears:
                write_linear(name)
        others = (arch.vectors(), weights.vector), (arch.arrays(), weights.array), (arch.tables(), weights.table)
        for names, read in others:
            for name in names:
                write(name, read(name))
