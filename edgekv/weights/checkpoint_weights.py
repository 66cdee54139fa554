"""Weights by the architecture's own names, read from an ordinary checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import numpy as np

from edgekv.checkpoint.checkpoint import Checkpoint
from edgekv.checkpoint.tensors import DTYPES, Tensor, to_float32
from edgekv.errors import ConfigError
from edgekv.kernels.cpu.blocks import BLOCKS
from edgekv.kernels.weight_codes import code_of_zero
from edgekv.models import unexpected
from edgekv.models.architecture import Architecture, WeightPart
from edgekv.types import F32, I64, U8, Array
from edgekv.weights.formats import FORMATS, ITEM_BYTES, FormatRows, MatrixFormat, ModelFormat, WeightFormat
from edgekv.weights.integers import pack_numbers

CodedRows = tuple[U8, Array, Array | None]
"""Codes (rows, blocks, bytes), scales (rows, blocks), and zero points or offsets as `Tensor.blocks` has them."""


class Weights(Protocol):
    """Read access to a model's weights, whatever they are stored as; arrays are float32.

    nbytes: bytes of all tensors that the model uses. token_bytes: bytes that one decode step reads. matrix: a
    linear layer's weights (rows, columns). bias: its biases (rows,), or None. vector: a norm (size,). array: one
    of `Architecture.arrays`. rows: rows ``ids`` of the table ``embed`` or ``positions``, (n, hidden).
    """

    arch: Architecture

    @property
    def nbytes(self) -> int: ...
    @property
    def token_bytes(self) -> int: ...
    def matrix(self, name: str) -> F32: ...
    def bias(self, name: str) -> F32 | None: ...
    def vector(self, name: str) -> F32: ...
    def array(self, name: str) -> F32: ...
    def rows(self, table: str, ids: I64) -> F32: ...


QUANTIZED_ELEMENTS = 1 << 24  # weights quantized or searched at a time: 64 MiB of float32


def holds_exactly(exact: str | None, form: WeightFormat) -> bool:
    """Returns whether weights of the format ``exact`` go into ``form`` unchanged: more bits, or smaller blocks."""
    if exact is None or form.bits == 32:
        return form.bits == 32
    stored = FORMATS[exact]
    if stored.kept or form.kept or form.rotated:
        return stored == form
    same = stored.zeros <= form.zeros and stored.offsets <= form.offsets and stored.e2m1 == form.e2m1
    fits = same if stored.bits == form.bits else stored.bits < form.bits and not stored.offsets
    return fits and stored.block % form.block == 0


def common_format(names: Collection[str]) -> str:
    """Returns the narrowest format that holds all exactly; if only f32 does, int8-32, which loses a little."""
    if len(names) == 1:
        return next(iter(names))
    stored = {"int8-32" if FORMATS[name].kept else name for name in names}  # kept blocks are rounded to it, too
    holding = (form for form in FORMATS.values() if all(holds_exactly(name, form) for name in stored))
    narrowest = min(holding, key=lambda form: form.bits).name
    return "int8-32" if narrowest == "f32" and "f32" not in stored else narrowest


def spans(parts: Sequence[WeightPart], max_elements: int) -> Iterator[tuple[WeightPart, int, int]]:
    """Yields the parts in order, each by rows lo..hi of at most ``max_elements`` weights."""
    for part in parts:
        n_rows = max(1, max_elements // part.columns)
        yield from ((part, lo, min(lo + n_rows, part.rows)) for lo in range(0, part.rows, n_rows))


class CheckpointWeights:
    """A checkpoint seen through an Architecture; every shape is checked when it is opened, nothing is read."""

    def __init__(self, source: Checkpoint, arch: Architecture) -> None:
        self.arch, self.source, self._tensors = arch, source, source.tensors
        self._linears, self._finite = arch.linears(), set[str]()  # finite: tensors that `_part_rows` has searched
        for tensor, shape in arch.tensors().items():
            self._tensors.require(tensor, shape)
        extra = unexpected(arch, self._tensors)
        if extra:
            raise ConfigError(
                f"config.json describes a {arch.config.model_type} model without the tensor {extra[0]} that the "
                f"checkpoint holds ({len(extra)} such tensors): config and weights do not belong together"
            )

    @property
    def table_dtypes(self) -> dict[str, str]:
        """Each table's dtype by safetensors' name: the checkpoint's own half or single precision."""
        stored = {name: self._tensors[tensor].dtype for name, (tensor, _) in self.arch.tables().items()}
        return {name: dtype if dtype in ITEM_BYTES else "F32" for name, dtype in stored.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in the checkpoint that the model uses."""
        return sum(self._tensors[name].nbytes for name in self.arch.tensors())

    @property
    def token_bytes(self) -> int:
        """Bytes that one decode step reads: all but the tables, of which it reads a row, and idle experts."""
        head, idle = {part.tensor for part in self._linears["head"].parts}, 0
        tables = {tensor for tensor, _ in self.arch.tables().values()} - head
        for linear in self._linears.values():
            if linear.n_experts:
                of_all = sum(self._tensors[name].nbytes for name in linear.tensors())
                idle += of_all // linear.n_experts * (linear.n_experts - self.arch.active_experts)
        return self.nbytes - idle - sum(self._tensors[name].nbytes for name in tables)

    def _parts(self, name: str) -> list[Tensor]:
        return [self._tensors[part.tensor] for part in self._linears[name].parts]

    @property
    def own_format(self) -> ModelFormat | None:
        """The format of each linear layer of a file that is quantized already, else None."""
        if not self.kinds:
            return None
        return ModelFormat(self._tensors.method, tuple((name, self._own_format(name)) for name in self._linears))

    def _own_format(self, name: str) -> str:
        """Returns the name of a linear layer's format: where parts are kept beside others, of both."""
        linear, formats = self._linears[name], [part.nearest_format for part in self._parts(name)]
        period = len(formats) // (linear.n_experts or 1)  # parts of an expert
        is_exact = all(part.exact_format == part.nearest_format for part in self._parts(name))
        is_mixed = len(set(formats)) > 1 and any(FORMATS[key].kept for key in formats) and "f32" not in formats
        if not is_mixed or not is_exact or formats != formats[:period] * (len(formats) // period):
            return common_format(set(formats))
        return "+".join(f"{key}*{part.rows}" for key, part in zip(formats[:period], linear.parts, strict=False))

    def requantized(self, form: ModelFormat) -> set[tuple[str, str]]:
        """Returns (type, new format) of quantized tensors that have other blocks than ``form`` and lose by it."""
        pieces = (pair for name in self._linears for pair in self._pieces(name, form.of(name)))
        tensors = ((self._tensors[part.tensor], piece.form) for piece, parts in pieces for part in parts)
        lossy = ((t.kind, stored.name) for t, stored in tensors if not holds_exactly(t.exact_format, stored))
        return {(kind, target) for kind, target in lossy if kind}

    @property
    def kinds(self) -> tuple[str, ...]:
        """Types of the quantized tensors."""
        return tuple(sorted({part.kind for name in self._linears for part in self._parts(name) if part.kind}))

    def _pieces(self, name: str, form: MatrixFormat) -> Iterator[tuple[FormatRows, Sequence[WeightPart]]]:
        """Yields the pieces of a linear layer, each with its parts."""
        for i, piece in enumerate(form.pieces):
            yield piece, self._linears[name].parts[i :: len(form.pieces)]

    def stored_arrays(
        self, name: str, form: MatrixFormat, rounded: tuple[U8, Array] | None = None
    ) -> Iterator[tuple[str, Array]]:
        """Yields name and array of a linear layer's arrays, in the order of ``form.arrays``.

        rounded: codes (rows, blocks, bytes) and scales (rows, blocks). Without, weights that the file has in the
        format are taken over, others are quantized.
        """
        for piece, parts in self._pieces(name, form):
            if piece.form.bits == 32:
                yield f"{piece.prefix}weight", self.matrix(name)
                continue
            if piece.form.kept:
                raw = list[U8]()
                for part, lo, hi in spans(parts, QUANTIZED_ELEMENTS):
                    raw.append(self._tensors[part.tensor].raw_rows(lo, hi))
                    self._tensors[part.tensor].require_finite(*BLOCKS[piece.form.name].decode(raw[-1])[1:])
                yield f"{piece.prefix}blocks", np.concatenate(raw)
                continue
            specs = piece.form.arrays(sum(part.rows for part in parts), parts[0].columns)
            arrays = {key: np.empty(shape, DTYPES[dtype]) for key, (dtype, shape) in specs.items()}
            zero, end = code_of_zero(piece.form.bits), 0  # end of the rows that are written
            for codes, scales, added in [(*rounded, None)] if rounded else self.codes_in(piece.form, parts):
                written = slice(end, end := end + len(codes))
                arrays["codes"][written], arrays["scales"][written] = codes, scales
                if piece.form.zeros:
                    arrays["zeros"][written] = zero if added is None else added + zero
                if piece.form.offsets:
                    arrays["offsets"][written] = -zero * scales if added is None else added
            yield from ((f"{piece.prefix}{key}", array) for key, array in arrays.items())

    def codes_in(self, form: WeightFormat, parts: Sequence[WeightPart]) -> Iterator[CodedRows]:
        """Yields parts in order: as stored if every part fits the format exactly; otherwise all are quantized."""
        if not all(holds_exactly(self._tensors[part.tensor].exact_format, form) for part in parts):
            for quantized in (form.quantize(self._part_rows(*span)) for span in spans(parts, QUANTIZED_ELEMENTS)):
                yield quantized["codes"], quantized["scales"], None
            return
        for part, lo, hi in spans(parts, QUANTIZED_ELEMENTS):
            numbers, scales, added = self._tensors[part.tensor].blocks(lo, hi)
            self._tensors[part.tensor].require_finite(scales, added)
            finer, n_blocks = numbers.shape[2] // form.block, form.n_blocks(part.columns)
            numbers = numbers.reshape(hi - lo, -1, form.block)[:, :n_blocks]
            scales = np.repeat(scales, finer, axis=1)[:, :n_blocks]
            added = None if added is None else np.repeat(added, finer, axis=1)[:, :n_blocks]
            if form.zeros and added is not None:
                numbers = numbers + added[..., None]
            yield pack_numbers(numbers, form.bits, e2m1=form.e2m1), scales, added

    def _part_rows(self, part: WeightPart, lo: int, hi: int, out: F32 | None = None) -> F32:
        """Returns rows lo..hi, in ``out`` if given; raises as `matrix`."""
        tensor = self._tensors[part.tensor]
        rows = to_float32(tensor.rows(lo, hi, part.conv1d), out)
        if part.tensor not in self._finite:
            tensor.require_finite(rows, below=1e15)  # float32 can't hold sums of larger ones' squares
        if hi == part.rows:
            self._finite.add(part.tensor)
        return rows

    def rows_of(self, name: str, max_elements: int) -> Iterator[F32]:
        """Yields a linear layer's rows (r, columns), ``max_elements`` or fewer at a time; raises as `matrix`."""
        return (self._part_rows(*span) for span in spans(self._linears[name].parts, max_elements))

    def matrix(self, name: str) -> F32:
        """Returns a linear layer's weights (rows, columns) float32. Raises CheckpointError for NaN or inf."""
        linear, end = self._linears[name], 0
        matrix = np.empty((linear.rows, linear.columns), np.float32)
        for part, lo, hi in spans(linear.parts, QUANTIZED_ELEMENTS):
            start, end = end, end + hi - lo
            self._part_rows(part, lo, hi, matrix[start:end])
        return matrix

    def bias(self, name: str) -> F32 | None:
        """Returns a linear layer's biases (rows,) float32, or None."""
        biases = self._linears[name].biases
        return np.concatenate([self._numbers(b) for b in biases]) if biases else None

    def _numbers(self, name: str) -> F32:
        """Returns a tensor of any shape. Raises CheckpointError for one with a number that is not finite."""
        numbers = to_float32(self._tensors[name].read())
        self._tensors[name].require_finite(numbers)
        return numbers

    def require_finite(self) -> None:
        """Reads all tensors. Raises CheckpointError for one with a number that is not finite."""
        for name in self.arch.tensors():
            self._numbers(name)

    def release(self, name: str) -> None:
        """Gives back the pages of a linear layer's tensors; the next access reads them again."""
        for part in self._parts(name):
            part.release()

    def vector(self, name: str) -> F32:
        """Returns a norm (size,) float32, with the offset that its family adds."""
        stored = self._numbers(self.arch.vectors()[name][0])
        return stored + np.float32(self.arch.norm_offset) if self.arch.norm_offset else stored

    def array(self, name: str) -> F32:
        """Returns one of `Architecture.arrays`, float32."""
        return self._numbers(self.arch.arrays()[name][0])

    def table(self, name: str) -> Array:
        """Returns a table (rows, hidden) in the dtype of `table_dtypes`."""
        stored = self._tensors[self.arch.tables()[name][0]].read()
        return to_float32(stored) if self.table_dtypes[name] == "F32" else stored

    def rows(self, table: str, ids: I64) -> F32:
        """Returns rows (n, hidden) float32 of the table ``embed`` or ``positions``."""
        return to_float32(self.table(table)[ids])
