"""What makes a weight store: of a checkpoint, of random numbers, or of layers that are rounded in another way."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgekv.checkpoint.content_hash import hash_spans
from edgekv.checkpoint.writer import TensorWriter
from edgekv.errors import CheckpointError, EdgeKVError
from edgekv.files import atomic_write
from edgekv.folders import written_whole
from edgekv.linear.formats import PerLinearFormat, Specs, WeightFormat, file_offsets, specs_bytes, store_specs
from edgekv.linear.quantize import n_blocks, quantize
from edgekv.linear.store import FORMAT, WEIGHTS_FILE, WeightStore, default_folder, is_store
from edgekv.linear.weights import CheckpointWeights, Codes
from edgekv.machine import format_bytes
from edgekv.types import F32, TaskProgress

BLOCK_ELEMENTS = 1 << 24  # rows converted at a time: 64 MiB of float32
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)

Write = Callable[[str, "tuple[Codes, F32] | None"], None]
"""Takes each linear layer in the order of the store: its name, and codes and scales where they are known."""


class Rounding(Protocol):
    """What hands on the linear layers in place of `build`, rounded in its own way.

    note: what store.json says of it. weights: the checkpoint's, with an identity that tells of the rounding.
    """

    note: str
    weights: CheckpointWeights

    def __call__(self, form: WeightFormat, write: Write) -> None:
        """Calls ``write`` for each."""


def open_or_build(
    weights: CheckpointWeights,
    form: WeightFormat,
    progress: TaskProgress | None,
    rounding: Rounding | None = None,
) -> WeightStore:
    """The checkpoint's store in the default folder, made first if it isn't there or is unreadable.

    rounding: see `build`.
    """
    folder = default_folder(weights.source.identify(progress), form)
    if is_store(folder):
        try:
            store = WeightStore(folder)
        except EdgeKVError:
            store = None
        if store and store.form == form:
            return store
        shutil.rmtree(folder, ignore_errors=True)  # damaged, or of a version that chose other formats
    build(weights, form, folder, progress, rounding=rounding)
    return WeightStore(folder)


def build(
    weights: CheckpointWeights,
    form: WeightFormat,
    folder: pathlib.Path,
    progress: TaskProgress | None,
    beside: Callable[[pathlib.Path], None] | None = None,
    rounding: Rounding | None = None,
) -> None:
    """Writes the store to ``folder`` in one rename: it is complete or it isn't there.

    beside(folder) adds files of its own. rounding: where not every block is rounded by itself. Streams: beside
    the mapped checkpoint and what a rounding takes at most about 0.3 GiB, or twice the bytes of a layer's experts
    in the store. Raises CheckpointError when the disk is too small (before or while writing) or the folder
    can't be written.
    """
    source, specs = weights.source, store_specs(weights.arch, form, weights.table_dtypes)
    try:
        with written_whole(folder, is_store) as partial:
            _require_space(folder, specs_bytes(specs))
            _write_weights(weights, form, specs, partial / WEIGHTS_FILE, progress, rounding)
            if form.bits == 32:
                _write_graphs(weights, specs, partial)
            for name in TOKENIZER_FILES:
                if source.tokenizer_folder and (source.tokenizer_folder / name).is_file():
                    shutil.copyfile(source.tokenizer_folder / name, partial / name)
            if beside:
                beside(partial)
            manifest = _manifest(weights, form, rounding)
            with open(partial / WEIGHTS_FILE, "rb") as file:
                manifest["sha256"] = hash_spans(file.fileno(), os.path.getsize(partial / WEIGHTS_FILE), progress)
            atomic_write(partial / "store.json", json.dumps(manifest, indent=1).encode())
    except OSError as error:
        raise CheckpointError(f"{folder}: can't write the store ({error.strerror or error})") from error


def _require_space(folder: pathlib.Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder.parent).free
    if free < nbytes * 1.01:
        raise CheckpointError(
            f"{folder}: the store needs {format_bytes(nbytes)}, the disk has {format_bytes(free)} "
            f"free; make room, or point XDG_CACHE_HOME (or `output`) to a larger disk"
        )


def _manifest(weights: CheckpointWeights, form: WeightFormat, rounding: Rounding | None) -> dict[str, Any]:
    source = weights.source
    manifest = {"format": FORMAT, "weights": form.name, "identity": source.identity, "config": source.config}
    if isinstance(form, PerLinearFormat):
        manifest["linears"] = dict(form.linears)
    if rounding:
        manifest["calibration"] = rounding.note
    return manifest


def _write_graphs(weights: CheckpointWeights, specs: Specs, folder: pathlib.Path) -> None:
    from edgekv.linear.graph import block_graphs  # onnx takes 0.2 s to import, and only a new store needs it

    start = os.path.getsize(folder / WEIGHTS_FILE) - specs_bytes(specs)
    graphs = block_graphs(weights.arch, specs, file_offsets(specs, start), WEIGHTS_FILE)
    for name, graph in graphs.items():
        (folder / name).write_bytes(graph)


def _write_weights(
    weights: CheckpointWeights,
    form: WeightFormat,
    specs: dict[str, tuple[str, tuple[int, ...]]],
    path: pathlib.Path,
    progress: TaskProgress | None,
    rounding: Rounding | None,
) -> None:
    arch, linears = weights.arch, weights.arch.linears()
    total, done = specs_bytes(specs), 0
    with TensorWriter(path, specs, {"weights": form.name}) as writer:

        def write(name: str, array: npt.NDArray[Any]) -> None:
            nonlocal done
            writer.write(name, array)
            done += array.nbytes
            if progress:
                progress("quantizing" if form.bits < 32 else "converting", done, total)

        def write_linear(name: str, rounded: tuple[Codes, F32] | None = None) -> None:
            linear, own = linears[name], form.of(name)
            if own.bits == 32:
                write(f"{name}.weight", weights.matrix(name))
            else:
                taken = None if rounded else weights.taken_over(name, own)
                codes, scales = rounded or taken or _quantized(weights, name, own, linear.rows, linear.columns)
                write(f"{name}.codes", codes)
                write(f"{name}.scales", scales)
                if own.zeros:
                    write(f"{name}.zeros", weights.zero_points(name, own))
                if own.offsets:
                    write(f"{name}.offsets", weights.offsets(name) if taken else np.zeros_like(scales))
            bias = weights.bias(name)
            if bias is not None:
                write(f"{name}.bias", bias)
            weights.release(name)

        if rounding:
            rounding(form, write_linear)
        else:
            for name in linears:
                write_linear(name)
        for name in arch.vectors():
            write(name, weights.vector(name))
        for name in arch.arrays():
            write(name, weights.array(name))
        for name in arch.tables():
            write(name, weights.table(name))


def _quantized(
    weights: CheckpointWeights, name: str, form: WeightFormat, rows: int, columns: int
) -> tuple[npt.NDArray[np.uint8], F32]:
    blocks = n_blocks(columns, form.block)
    codes = np.empty((rows, blocks, form.block * form.bits // 8), np.uint8)
    scales = np.empty((rows, blocks), np.float32)
    row = 0
    for block in weights.blocks(name, BLOCK_ELEMENTS):
        end = row + len(block)
        quantize(block, form.bits, form.block, codes[row:end], scales[row:end])
        row = end
    return codes, scales
