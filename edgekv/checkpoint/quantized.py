"""Readers of published quantized checkpoints, which unpack weight matrices when they are read.

METHODS has a function for each quantization method in config.json. Sources of the layouts: AutoGPTQ, GPTQModel,
AutoAWQ, compressed-tensors, transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from edgekv.checkpoint.tensors import EXPERT_PARTS, Tensor, Tensors, to_float32
from edgekv.checks import read_fields
from edgekv.errors import CheckpointError, ConfigError, short_repr
from edgekv.types import F32, I8, I64, U8, Array

Words = npt.NDArray[np.uint32]
Codes = npt.NDArray[np.int16]
Rows = Callable[[int, int], Any]  # a function of lo and hi that computes rows lo..hi
GROUP_SIZES = (128, 32)  # columns per scale in the weight formats, the larger first
PIECE = 1 << 22  # elements unpacked at a time
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the columns in a word, from the low bits
MX_BLOCK = 32
E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the values of the 16 e2m1 codes, as integers."""
MX_BIAS, MX_MOST = 128, 254  # the bias of exponents of half scales, and the largest valid exponent
PLAIN = "int8-32"  # format of the matrices that are not packed, mostly the language-model head
IGNORED = re.compile(r"\.(input_scale|activation_scale|input_scale_ub|k_scale|v_scale)$")
Side = Annotated[int, Meta(ge=1, le=1 << 20)]


class Quantization(Struct):
    """The fields of quantization_config that are read."""

    bits: Annotated[int, Meta(ge=2, le=8)] | None = None
    checkpoint_format: str | None = None
    version: str | None = None
    weight_block_size: Annotated[list[Side], Meta(min_length=2, max_length=2)] | None = None

    def width(self, method: str, *accepted: int) -> int:
        """Returns the bits of a weight. Raises ConfigError for bits that are not ``accepted``."""
        bits = self.bits or 4
        if bits not in accepted:
            raise _unsupported("bits", bits, f"accepted for {method}: {', '.join(map(str, accepted))}")
        return bits


class Module:
    """The tensors of one linear layer, by the suffixes of their names.

    parts: the tensors of the packed matrix. Methods raise CheckpointError for tensors of another shape or type.
    """

    ENDS = (
        *(".weight", ".qweight", ".qzeros", ".scales", ".g_idx", ".weight_scale", ".weight_scale_inv"),
        *(".weight_packed", ".weight_shape", ".weight_zero_point", ".weight_g_idx"),
    )

    def __init__(self, tensors: Tensors, name: str) -> None:
        self.tensors, self.name = tensors, name
        self.parts = [tensors[name + end] for end in self.ENDS if end in self]

    def __contains__(self, end: str) -> bool:
        return self.name + end in self.tensors

    def words(self, end: str) -> Words:
        """Returns a matrix of 32-bit words (r, n)."""
        array = self.matrix(end)
        if array.dtype.itemsize != 4 or array.dtype.kind not in "iu":
            raise self.shape_error(end, "a matrix of 32-bit words")
        return array.view(np.uint32)

    def matrix(self, end: str) -> Array:
        """Returns a matrix (r, n) that is not empty."""
        array = self.tensors[self.name + end].read()
        if array.ndim != 2 or not array.size:
            raise self.shape_error(end, "a matrix")
        return array

    def shaped(self, end: str, *shapes: tuple[int, ...]) -> Array:
        """Returns an array of one of the given shapes, such as (rows, 1) or (rows,)."""
        array = self.tensors[self.name + end].read()
        if array.shape not in shapes:
            raise self.shape_error(end, " or ".join(map(str, shapes)))
        return array

    def group_of(self, columns: int, groups: int) -> I64 | None:
        """Returns each column's group (columns,); None if groups are consecutive columns of equal number."""
        end = next((end for end in (".g_idx", ".weight_g_idx") if end in self), None)
        if end is None:
            return None
        group_of = self.shaped(end, (columns,)).astype(np.int64)
        if group_of.min() < 0 or group_of.max() >= groups:
            raise self.shape_error(end, f"numbers of {groups} groups")
        return None if np.array_equal(group_of, np.arange(columns) // -(-columns // groups)) else group_of

    def shape_error(self, end: str, accepted: str) -> CheckpointError:
        """Returns the error for a tensor of a wrong type or shape. accepted: a description of the right one."""
        tensor = self.tensors[self.name + end]
        return tensor.error(
            f"is {tensor.dtype} {tensor.shape}, expected {accepted}: download the checkpoint again"
        )


def modules(tensors: Tensors, end: str) -> Iterator[Module]:
    """Yields the modules that have a tensor with this suffix."""
    return (Module(tensors, name.removesuffix(end)) for name in tensors if name.endswith(end))


class QuantizedTensor(Tensor):
    """A quantized matrix, which reads as float16.

    kind: the name of its format, for users. parts: the checkpoint's tensors that hold ``shared`` such matrices.
    values: computes rows lo..hi, (hi - lo, columns) float32.
    """

    nearest_format = "int8-32"  # loses little

    def __init__(
        self, parts: list[Tensor], module: str, kind: str, shape: tuple[int, int], values: Rows, shared: int = 1
    ) -> None:
        self.kind, self.parts, self._values = kind, parts, values
        nbytes = sum(part.nbytes for part in parts) // shared
        super().__init__(parts[0].path, f"{module}.weight", "F16", shape, nbytes)

    def read(self) -> Array:
        """Returns all values, (rows, columns) float16."""
        rows, columns = self.shape
        out, step = np.empty(self.shape, np.float16), max(1, PIECE // columns)
        for a in range(0, rows, step):
            out[a : a + step] = self._values(a, min(a + step, rows))
        return out

    def rows(self, lo: int, hi: int, transposed: bool = False) -> Array:
        values: Array = self._values(lo, hi)
        return values

    def release(self) -> None:
        for part in self.parts:
            part.release()


class GroupedTensor(QuantizedTensor):
    """A matrix of integers times the scale of their group of columns.

    bits: the bits of an integer. numbers: computes rows lo..hi, (hi - lo, columns), minus half the range.
    scales: (rows, groups). zeros: zero points (rows, groups), minus half the range; None: all are 0.
    """

    def __init__(
        self, module: Module, kind: str, bits: int, columns: int, numbers: Rows, scales: Array, zeros: Codes | None
    ) -> None:
        rows, groups = scales.shape
        if columns % groups:
            raise module.parts[0].error(f"has {columns} columns, which {groups} groups do not divide")
        group, group_of = columns // groups, module.group_of(columns, groups)
        name = f"{kind} {bits}-bit" + ("" if group_of is None else " act-order")
        super().__init__(module.parts, module.name, name, (rows, columns), self._unpack)
        self._numbers, self._scales, self._zeros = numbers, scales, zeros
        self._columns = np.arange(columns) // group if group_of is None else group_of
        self._block = next((size for size in GROUP_SIZES if group % size == 0 or groups == 1), 0)
        centred = zeros is None or not zeros.any()
        if self._block and group_of is None and (bits == 4 or centred):
            fits = centred or zeros is None or (zeros.min() >= -8 and zeros.max() <= 7)
            size, end = "" if self._block == 128 else "-32", "" if centred or not fits else "-zeros"
            self.exact_format = self.nearest_format = f"int{bits if fits else 8}{size}{end}"

    def _unpack(self, lo: int, hi: int) -> F32:
        return self._codes(lo, hi) * self._scaled(lo, hi)

    def _codes(self, lo: int, hi: int) -> Codes:
        """Returns integers (hi - lo, columns) minus their zero points."""
        codes: Codes = self._numbers(lo, hi)
        return codes if self._zeros is None else codes - self._zeros[lo:hi][:, self._columns]

    def _scaled(self, lo: int, hi: int, step: int = 1) -> F32:
        """Returns the scales of every ``step``-th column, (hi - lo, columns / step)."""
        scales: F32 = to_float32(np.ascontiguousarray(self._scales[lo:hi]))[:, self._columns[::step]]
        return scales

    def blocks(self, lo: int, hi: int) -> tuple[I8, F32, Array | None]:
        if self.exact_format is None:
            return super().blocks(lo, hi)
        columns = self.shape[1]
        n, step = -(-columns // self._block), max(1, PIECE // columns)
        codes = np.zeros((hi - lo, n * self._block), np.int8)
        for a in range(lo, hi, step):
            b = min(a + step, hi)
            codes[a - lo : b - lo, :columns] = self._codes(a, b)
        scales, zeros = np.ascontiguousarray(self._scaled(lo, hi, self._block)), None
        if self._zeros is not None and self.exact_format.endswith("-zeros"):
            zeros = self._zeros[lo:hi][:, self._columns[:: self._block]].astype(np.int8)
        return codes.reshape(hi - lo, n, self._block), scales, zeros


def unpack_words(words: Words, bits: int, order: Sequence[int] | None = None) -> Codes:
    """Unpacks words (r, n) to integers (r, n * 32 // bits), the low bits first, minus half the range.

    order: the column of each integer within its word; None: in order.
    """
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    if order is not None:
        shifts = shifts[np.argsort(order)]
    numbers = np.ascontiguousarray(words)[:, :, None] >> shifts & np.uint32((1 << bits) - 1)
    codes: Codes = numbers.reshape(len(words), -1).astype(np.int16)
    codes -= np.int16(1 << (bits - 1))
    return codes


def gptq(tensors: Tensors, settings: Quantization) -> Iterator[QuantizedTensor]:
    """Reads GPTQ: qweight (packed columns, rows); stored zero points are 1 lower, except in gptq_v2."""
    bits, add = settings.width("gptq", 4, 8), 0 if settings.checkpoint_format == "gptq_v2" else 1
    for module in modules(tensors, ".qweight"):
        words, zeros = module.words(".qweight"), unpack_words(module.words(".qzeros"), bits) + np.int16(add)

        def numbers(lo: int, hi: int, words: Words = words) -> Codes:
            return unpack_words(words[:, lo:hi].T, bits)

        yield _transposed(module, "GPTQ", bits, (words.shape[1], len(words) * 32 // bits), numbers, zeros)


def awq(tensors: Tensors, settings: Quantization) -> Iterator[QuantizedTensor]:
    """Reads AWQ's version gemm: qweight (columns, rows packed in AWQ_ORDER)."""
    if (settings.version or "gemm").lower() != "gemm":
        raise _unsupported("version", settings.version, "accepted for awq: gemm")
    settings.width("awq", 4)
    for module in modules(tensors, ".qweight"):
        words, zeros = module.words(".qweight"), unpack_words(module.words(".qzeros"), 4, AWQ_ORDER)

        def numbers(lo: int, hi: int, words: Words = words) -> Codes:
            whole = unpack_words(words[:, lo // 8 : -(-hi // 8)], 4, AWQ_ORDER)
            codes: Codes = whole[:, lo % 8 : lo % 8 + hi - lo].T
            return codes

        yield _transposed(module, "AWQ", 4, (words.shape[1] * 8, len(words)), numbers, zeros)


def _transposed(
    module: Module, kind: str, bits: int, shape: tuple[int, int], numbers: Rows, zeros: Codes
) -> GroupedTensor:
    """Returns a matrix of GPTQ or AWQ. zeros: (groups, rows), minus half the range; scales are (groups, rows)."""
    (rows, columns), groups = shape, len(zeros)
    module.shaped(".qzeros", (groups, rows * bits // 32))
    scales = module.shaped(".scales", (groups, rows))
    return GroupedTensor(module, kind, bits, columns, numbers, scales.T, zeros.T)


def compressed(tensors: Tensors, settings: Quantization) -> Iterator[QuantizedTensor]:
    """Reads the weight-only formats of compressed-tensors (w4a16, w8a16, float8), which the tensors tell apart."""
    yield from float8(tensors, settings)
    yield from (_packed_rows(module) for module in modules(tensors, ".weight_packed"))
    for module in modules(tensors, ".weight_scale"):
        weight = tensors.get(f"{module.name}.weight")
        if weight is not None and weight.dtype == "I8" and len(weight.shape) == 2:
            yield _plain_int8(module)


def _packed_rows(module: Module) -> GroupedTensor:
    """Reads pack-quantized: words (rows, packed columns), scales (rows, groups)."""
    words, scales = module.words(".weight_packed"), module.matrix(".weight_scale")
    rows, columns = (int(n) for n in module.shaped(".weight_shape", (2,)).astype(np.int64))
    bits = next((b for b in (4, 8) if -(-columns * b // 32) == words.shape[1]), 0)
    if not bits or len(words) != rows or len(scales) != rows:
        raise module.shape_error(".weight_packed", f"{rows} rows of {columns} columns in 4 or 8 bits")
    zeros = None
    if ".weight_zero_point" in module:  # (rows packed, groups)
        module.shaped(".weight_zero_point", (-(-rows * bits // 32), scales.shape[1]))
        zeros = unpack_words(module.words(".weight_zero_point").T, bits).T[:rows]

    def numbers(lo: int, hi: int) -> Codes:
        return unpack_words(words[lo:hi], bits)[:, :columns]

    return GroupedTensor(module, "compressed-tensors", bits, columns, numbers, scales, zeros)


def _plain_int8(module: Module) -> GroupedTensor:
    """Reads int-quantized: int8 weights with one scale per row."""
    if ".weight_zero_point" in module:
        raise module.shape_error(".weight_zero_point", "none: symmetric weights")
    weight = module.matrix(".weight")
    rows, columns = weight.shape
    scales = module.shaped(".weight_scale", (rows, 1), (rows,)).reshape(rows, 1)

    def numbers(lo: int, hi: int) -> Codes:
        return weight[lo:hi].astype(np.int16)

    return GroupedTensor(module, "compressed-tensors", 8, columns, numbers, scales, None)


def float8(tensors: Tensors, settings: Quantization) -> Iterator[QuantizedTensor]:
    """Reads weights in e4m3 with weight_scale_inv (a factor in spite of its name), or weight_scale.

    There is one scale for all, one per row, or one per block of rows and columns: transformers' fine-grained FP8,
    fbgemm and compressed-tensors.
    """
    for end in (".weight_scale_inv", ".weight_scale"):
        for module in modules(tensors, end):
            weight = tensors.get(f"{module.name}.weight")
            if weight is not None and weight.dtype == "F8_E4M3":
                yield _float8(module, weight.raw(), end, settings.weight_block_size or [128, 128])


def _float8(module: Module, weight: U8, end: str, sides: list[int]) -> QuantizedTensor:
    if weight.ndim != 2 or not weight.size:
        raise module.shape_error(".weight", "a matrix")
    (rows, columns), (high, wide) = weight.shape, sides
    scale = to_float32(module.tensors[module.name + end].read())
    if scale.size == 1:
        high, wide, scale = rows, columns, scale.reshape(1, 1)
    elif scale.shape in ((rows,), (rows, 1)):
        high, wide, scale = 1, columns, scale.reshape(rows, 1)
    elif scale.shape != (-(-rows // high), -(-columns // wide)):
        raise module.shape_error(end, f"a scale per {high} rows and {wide} columns")

    def values(lo: int, hi: int) -> F32:
        numbers = weight[lo:hi].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        found: F32 = numbers * scale[np.arange(lo, hi) // high][:, np.arange(columns) // wide]
        return found

    return QuantizedTensor(module.parts, module.name, "FP8", (rows, columns), values)


class MxFp4Tensor(QuantizedTensor):
    """A projection of an expert: codes (rows, blocks, 16) of two e2m1 values each, exponents (rows, blocks)."""

    exact_format = nearest_format = "fp4-32"

    def __init__(self, parts: list[Tensor], module: str, codes: U8, exponents: U8, shared: int) -> None:
        self._codes, self._exponents = codes, exponents
        shape = len(codes), MX_BLOCK * codes.shape[1]
        super().__init__(parts, module, "MXFP4", shape, self._unpack, shared)

    def _unpack(self, lo: int, hi: int) -> F32:
        whole, scales, _ = self.blocks(lo, hi)
        values: F32 = (whole * scales[..., None]).reshape(hi - lo, -1)
        return values

    def blocks(self, lo: int, hi: int) -> tuple[I8, F32, None]:
        """Returns twice the values (hi - lo, blocks, 32), and half their scales (hi - lo, blocks)."""
        packed = self._codes[lo:hi]
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:2], MX_BLOCK)
        exponents = np.minimum(self._exponents[lo:hi], MX_MOST).astype(np.int32) - MX_BIAS
        scales: F32 = np.ldexp(np.float32(1), exponents).astype(np.float32)
        return E2M1_DOUBLED[codes], scales, None


def mxfp4(tensors: Tensors, settings: Quantization) -> Iterator[QuantizedTensor]:
    """Reads GPT-OSS: ``experts.gate_up_proj_blocks`` (experts, rows, blocks, 16) and ``_scales``; and down_proj's.

    32 values of 4-bit e2m1 share a power of two; a projection has rows first, first + step, ... of its tensor.
    """
    for projection, projections in EXPERT_PARTS.items():
        for module in modules(tensors, f".{projection}_blocks"):
            ends = f".{projection}_blocks", f".{projection}_scales"
            parts = [tensors[module.name + end] for end in ends]
            codes, exponents = (part.read() for part in parts)
            if codes.dtype != np.uint8 or codes.ndim != 4 or codes.shape[3] != MX_BLOCK // 2 or not codes.size:
                raise module.shape_error(ends[0], "bytes (experts, rows, blocks, 16)")
            if exponents.dtype != np.uint8 or exponents.shape != codes.shape[:3]:
                raise module.shape_error(ends[1], f"bytes {codes.shape[:3]}")
            for e in range(len(codes)):
                for part, first, step in projections:
                    arrays = codes[e, first::step], exponents[e, first::step]
                    yield MxFp4Tensor(parts, f"{module.name}.{e}.{part}", *arrays, len(codes) * step)


METHODS: dict[str, Callable[[Tensors, Quantization], Iterator[QuantizedTensor]]] = {
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": compressed,
    "fp8": float8,
    "fbgemm_fp8": float8,
    "mxfp4": mxfp4,
}


def unpack_tensors(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Returns a checkpoint's tensors, with matrices in place of the packed tensors that its config declares.

    Raises ConfigError for an unsupported method, CheckpointError for tensors that do not fit it.
    """
    method = quantization_method(config)
    if method is None:
        return tensors
    settings = read_fields(
        config["quantization_config"],
        Quantization,
        "config.json: quantization_config",
        "give the checkpoint's own",
    )
    packed = {tensor.name: tensor for tensor in METHODS[method](tensors, settings)}
    packed_names = {part.name for tensor in packed.values() for part in tensor.parts}
    plain = {name: tensor for name, tensor in tensors.items() if name not in packed_names}
    for tensor in plain.values():
        tensor.nearest_format = PLAIN
    readable = {name: tensor for name, tensor in {**packed, **plain}.items() if not IGNORED.search(name)}
    return Tensors(readable, tensors.files, method)


def quantization_method(config: Mapping[str, Any]) -> str | None:
    """Returns a name of METHODS; None: not quantized. Raises ConfigError for an unsupported method."""
    raw = config.get("quantization_config")
    if raw is None and config.get("quantization") is None:
        return None
    method = raw.get("quant_method") if isinstance(raw, dict) else "mlx" if raw is None else None
    if not isinstance(method, str) or method not in METHODS:
        raise _unsupported("quant_method", method, f"accepted: {', '.join(METHODS)}; or give a GGUF file of it")
    return method


def _unsupported(field: str, value: object, accepted: str) -> ConfigError:
    return ConfigError(f"config.json: quantization_config: {field} is {short_repr(value)}; {accepted}")
