"""How published checkpoints pack their weights, by the method that config.json names.

Sources of the layouts: AutoGPTQ, GPTQModel, AutoAWQ, bitsandbytes, mlx-lm, compressed-tensors, transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import ml_dtypes
import msgspec
import numpy as np
from msgspec import Meta, Struct

from edgekv.checkpoint.quantized import (
    SIDE,
    Codes,
    GroupedTensor,
    Quantization,
    QuantizedTensor,
    TensorReader,
    unpack,
)
from edgekv.checkpoint.tensors import EXPERT_PARTS, Tensors, to_float32
from edgekv.checks import short_repr
from edgekv.errors import ConfigError
from edgekv.types import F32, I8

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the columns in a word, from the low bits on
MX_BLOCK = 32
E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the numbers that the 16 e2m1 codes stand for, which are then whole."""
MX_BIAS, MX_MOST = 128, 254  # of the exponents, for twice the numbers; and the largest that is a number
PLAIN = "int8-32"  # format of what a packed checkpoint leaves unpacked, mostly the language-model head
IGNORED = re.compile(r"\.(input_scale|activation_scale|input_scale_ub|k_scale|v_scale)$")
Packed = dict[str, QuantizedTensor]


class TransposedTensor(GroupedTensor):
    """GPTQ's and AWQ's: (columns, rows), zero points and scales (groups, rows)."""

    def __init__(
        self, reader: TensorReader, module: str, kind: str, bits: int, order: tuple[int, ...] | None, add: int
    ) -> None:
        """order: of the numbers in a word of rows (None: the words go along the columns). add: to zero points."""
        self._per_word, self._bits, self._order = 32 // bits, bits, order
        self._words = reader.words(f"{module}.qweight")
        zeros = reader.words(f"{module}.qzeros")
        columns, rows = self._words.shape
        rows, columns = (rows, columns * self._per_word) if order is None else (rows * self._per_word, columns)
        groups = len(zeros)
        if columns % groups:
            raise reader.wrong(f"{module}.qzeros", f"rows that divide {columns} columns")
        reader.shaped(f"{module}.qzeros", (groups, rows // self._per_word))
        self._scales = reader.shaped(f"{module}.scales", (groups, rows))
        self._zeros = unpack(zeros, bits, order) + np.int16(add)
        self._half = np.int16(1 << (bits - 1))
        group_of = reader.group_of(f"{module}.g_idx", columns, groups)
        parts = reader.beside(module, ".qweight", ".qzeros", ".scales", ".g_idx")
        centred = self._zeros - self._half
        super().__init__(reader, module, kind, (rows, columns), parts, bits, columns // groups, centred, group_of)

    def codes(self, lo: int, hi: int) -> Codes:
        if self._order is None:
            numbers = unpack(np.ascontiguousarray(self._words[:, lo:hi].T), self._bits)
        else:
            first, stop = lo // self._per_word, -(-hi // self._per_word)
            whole = unpack(np.ascontiguousarray(self._words[:, first:stop]), self._bits, self._order)
            start = lo - first * self._per_word
            numbers = whole[:, start : start + hi - lo].T
        codes: Codes = numbers - self._zeros[:, lo:hi].T[:, self._columns]
        return codes

    def group_zeros(self, lo: int, hi: int) -> Codes:
        zeros: Codes = (self._zeros[:, lo:hi] - self._half).T
        return zeros

    def scales(self, lo: int, hi: int) -> F32:
        return to_float32(np.ascontiguousarray(self._scales[:, lo:hi].T))


def gptq(reader: TensorReader, settings: Quantization) -> Packed:
    """qweight (columns packed, rows); zero points are stored less 1, but for checkpoint_format gptq_v2."""
    bits, add = settings.width("gptq", 4, 8), 0 if settings.checkpoint_format == "gptq_v2" else 1
    return _by_name(TransposedTensor(reader, m, "GPTQ", bits, None, add) for m in reader.named(".qweight"))


def awq(reader: TensorReader, settings: Quantization) -> Packed:
    """qweight (columns, rows packed in AWQ_ORDER), as version gemm has it."""
    if (settings.version or "gemm").lower() != "gemm":
        raise ConfigError(
            f"config.json: quantization_config: version is {short_repr(settings.version)}; accepted for awq: gemm"
        )
    bits = settings.width("awq", 4)
    return _by_name(TransposedTensor(reader, m, "AWQ", bits, AWQ_ORDER, 0) for m in reader.named(".qweight"))


class CompressedTensor(GroupedTensor):
    """compressed-tensors' pack-quantized: (rows, columns packed) less half the range, scales (rows, groups)."""

    def __init__(self, reader: TensorReader, module: str) -> None:
        self._words = reader.words(f"{module}.weight_packed")
        rows, columns = (int(n) for n in reader.shaped(f"{module}.weight_shape", (2,)).astype(np.int64))
        self._scales = reader.matrix(f"{module}.weight_scale")
        width, groups = self._words.shape[1], self._scales.shape[1]
        bits = next((b for b in (4, 8) if -(-columns * b // 32) == width), 0)
        if not bits or len(self._words) != rows or len(self._scales) != rows or columns % groups:
            raise reader.wrong(f"{module}.weight_packed", f"{rows} rows of {columns} columns in 4 or 8 bits")
        self._bits, self._half = bits, np.int16(1 << (bits - 1))
        self._zeros = self._read_zeros(reader, f"{module}.weight_zero_point", groups)
        group_of = reader.group_of(f"{module}.weight_g_idx", columns, groups)
        endings = (".weight_packed", ".weight_shape", ".weight_scale", ".weight_zero_point", ".weight_g_idx")
        parts, group = reader.beside(module, *endings), columns // groups
        kind = "compressed-tensors"
        super().__init__(reader, module, kind, (rows, columns), parts, bits, group, self._zeros, group_of)

    def _read_zeros(self, reader: TensorReader, name: str, groups: int) -> Codes | None:
        """(rows, groups) around 0; packed along the rows."""
        if name not in reader.tensors:
            return None
        rows, packed = len(self._words), reader.words(name)
        if packed.shape != (-(-rows * self._bits // 32), groups):
            raise reader.wrong(name, f"{rows} rows of {groups} groups in {self._bits} bits")
        zeros: Codes = unpack(np.ascontiguousarray(packed.T), self._bits).T[:rows] - self._half
        return zeros

    def codes(self, lo: int, hi: int) -> Codes:
        codes: Codes = unpack(self._words[lo:hi], self._bits)[:, : self.shape[1]] - self._half
        if self._zeros is not None:
            codes -= self._zeros[lo:hi][:, self._columns]
        return codes

    def group_zeros(self, lo: int, hi: int) -> Codes:
        return super().group_zeros(lo, hi) if self._zeros is None else self._zeros[lo:hi]

    def scales(self, lo: int, hi: int) -> F32:
        return to_float32(np.ascontiguousarray(self._scales[lo:hi]))


class Int8Tensor(GroupedTensor):
    """compressed-tensors' int-quantized: int8 weights, one scale per row."""

    def __init__(self, reader: TensorReader, module: str) -> None:
        if reader.beside(module, ".weight_zero_point"):
            raise reader.wrong(f"{module}.weight_zero_point", "none: symmetric weights")
        self._codes = reader.matrix(f"{module}.weight")
        rows, columns = self._codes.shape
        self._scales = reader.shaped(f"{module}.weight_scale", (rows, 1), (rows,)).reshape(rows, 1)
        parts, group = [f"{module}.weight", f"{module}.weight_scale"], -(-columns // 128) * 128
        super().__init__(reader, module, "compressed-tensors", (rows, columns), parts, 8, group, None)

    def codes(self, lo: int, hi: int) -> Codes:
        return self._codes[lo:hi].astype(np.int16)

    def scales(self, lo: int, hi: int) -> F32:
        return to_float32(np.ascontiguousarray(self._scales[lo:hi]))


def compressed(reader: TensorReader, settings: Quantization) -> Packed:
    """All that compressed-tensors writes of weights alone (w4a16, w8a16); told apart by the tensors."""
    found = float8(reader, settings)
    found |= _by_name(CompressedTensor(reader, m) for m in reader.named(".weight_packed"))
    for module in reader.named(".weight_scale"):
        weight = reader.tensors.get(f"{module}.weight")
        if weight is not None and weight.dtype == "I8" and len(weight.shape) == 2:
            found[weight.name] = Int8Tensor(reader, module)
    return found


class Float8Tensor(QuantizedTensor):
    """e4m3 numbers times a scale: one for all, one per row, or one per block of rows and columns."""

    def __init__(self, reader: TensorReader, module: str, ending: str, sides: list[int] | None) -> None:
        self._bytes = reader.tensors[f"{module}.weight"].raw()
        if self._bytes.ndim != 2 or not self._bytes.size:
            raise reader.wrong(f"{module}.weight", "a matrix")
        rows, columns = self._bytes.shape
        high, wide = sides or (128, 128)
        scale = to_float32(reader.tensors[f"{module}{ending}"].read())
        if scale.size == 1:
            high, wide, scale = rows, columns, scale.reshape(1, 1)
        elif scale.shape in ((rows,), (rows, 1)):
            high, wide, scale = 1, columns, scale.reshape(rows, 1)
        elif scale.shape != (-(-rows // high), -(-columns // wide)):
            raise reader.wrong(f"{module}{ending}", f"a scale per {high} rows and {wide} columns")
        self._scale, self._high, self._wide = scale, high, wide
        super().__init__(reader, module, "FP8", (rows, columns), [f"{module}.weight", f"{module}{ending}"])

    def values(self, lo: int, hi: int) -> F32:
        numbers = self._bytes[lo:hi].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        rows, columns = np.arange(lo, hi) // self._high, np.arange(self.shape[1]) // self._wide
        values: F32 = numbers * self._scale[rows][:, columns]
        return values


def float8(reader: TensorReader, settings: Quantization) -> Packed:
    """weight in e4m3 and weight_scale_inv (a factor in spite of its name), or weight_scale.

    As transformers' fine-grained FP8, fbgemm and compressed-tensors write them.
    """
    found: Packed = {}
    for ending in (".weight_scale_inv", ".weight_scale"):
        for module in reader.named(ending):
            weight = reader.tensors.get(f"{module}.weight")
            if weight is not None and weight.dtype == "F8_E4M3":
                found[weight.name] = Float8Tensor(reader, module, ending, settings.weight_block_size)
    return found


class QuantState(Struct):
    """bitsandbytes' own, JSON in a tensor."""

    quant_type: str
    blocksize: Annotated[int, Meta(ge=1, le=1 << 16)]
    shape: Annotated[list[SIDE], Meta(min_length=2, max_length=2)]
    nested_blocksize: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
    nested_offset: float = 0.0


class NormalFloatTensor(QuantizedTensor):
    """bitsandbytes' nf4 and fp4: numbers of a table of 16 times the largest of a block, perhaps packed too."""

    def __init__(self, reader: TensorReader, module: str, ending: str) -> None:
        weight = f"{module}.weight"
        try:
            state = msgspec.json.decode(reader.tensors[f"{weight}{ending}"].raw().tobytes(), type=QuantState)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise reader.wrong(f"{weight}{ending}", "bitsandbytes' quant_state") from None
        rows, columns = state.shape
        self._codes = reader.tensors[weight].read().reshape(-1)
        self._table = to_float32(reader.shaped(f"{weight}.quant_map", (16,)))
        n_blocks = -(-rows * columns // state.blocksize)
        largest = reader.shaped(f"{weight}.absmax", (n_blocks,))
        parts = [weight, *reader.beside(weight, ending, ".quant_map", ".absmax")]
        if self._codes.size != -(-rows * columns // 2) or self._codes.dtype != np.uint8:
            raise reader.wrong(weight, f"{rows} x {columns} numbers in 4 bits")
        if state.nested_blocksize is not None:
            n = -(-n_blocks // state.nested_blocksize)
            steps = to_float32(reader.shaped(f"{weight}.nested_absmax", (n,)))
            table = to_float32(reader.shaped(f"{weight}.nested_quant_map", (256,)))
            if largest.dtype != np.uint8:
                raise reader.wrong(f"{weight}.absmax", "bytes")
            each = steps[np.arange(n_blocks) // state.nested_blocksize]
            largest = table[largest] * each + np.float32(state.nested_offset)
            parts += [f"{weight}.nested_absmax", f"{weight}.nested_quant_map"]
        self._largest, self._size = to_float32(largest), state.blocksize
        super().__init__(reader, module, f"bitsandbytes {state.quant_type}", (rows, columns), parts)

    def values(self, lo: int, hi: int) -> F32:
        first, stop = lo * self.shape[1], hi * self.shape[1]
        pairs = self._codes[first // 2 : -(-stop // 2)]
        codes = np.stack([pairs >> 4, pairs & 15], axis=1).reshape(-1)  # the high half first
        numbers = self._table[codes[first % 2 : first % 2 + stop - first]]
        values: F32 = numbers * self._largest[np.arange(first, stop) // self._size]
        return values.reshape(hi - lo, -1)


def bitsandbytes(reader: TensorReader, settings: Quantization) -> Packed:
    """4-bit weights; what is in 8 bits has outliers apart, and is refused."""
    if any(name.endswith(".SCB") for name in reader.tensors):
        raise ConfigError(
            "config.json: quantization_config: bitsandbytes in 8 bits is not supported; accepted: 4 bits"
        )
    endings = [f".quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")]
    return _by_name(NormalFloatTensor(reader, m, end) for end in endings for m in reader.named(f".weight{end}"))


class MlxTensor(QuantizedTensor):
    """MLX's affine: (rows, columns packed), each group of columns with a scale and a bias."""

    def __init__(self, reader: TensorReader, module: str, settings: Quantization) -> None:
        self._bits = settings.width("mlx", 2, 4, 8)
        self._words = reader.words(f"{module}.weight")
        rows, columns = len(self._words), self._words.shape[1] * 32 // self._bits
        self._group = settings.group_size or 64
        if self._group < 1 or columns % self._group:
            raise reader.wrong(f"{module}.weight", f"columns that {self._group} divides")
        shape = (rows, columns // self._group)
        self._ends = [reader.shaped(f"{module}.{end}", shape) for end in ("scales", "biases")]
        parts = [f"{module}.{end}" for end in ("weight", "scales", "biases")]
        super().__init__(reader, module, f"MLX {self._bits}-bit", (rows, columns), parts)

    def values(self, lo: int, hi: int) -> F32:
        scales, biases = (to_float32(np.ascontiguousarray(end[lo:hi]))[..., None] for end in self._ends)
        numbers = unpack(self._words[lo:hi], self._bits).reshape(hi - lo, -1, self._group)
        values: F32 = (numbers * scales + biases).reshape(hi - lo, -1)
        return values


def mlx(reader: TensorReader, settings: Quantization, raw: Mapping[str, Any]) -> Packed:
    """raw: the whole settings, where a module may have its own under its name."""
    if settings.mode not in (None, "affine"):
        raise ConfigError(f"config.json: quantization: mode is {short_repr(settings.mode)}; accepted: affine")

    def own(module: str) -> Quantization:
        found = raw.get(module)
        return Quantization.read(found, module) if isinstance(found, dict) else settings

    return _by_name(MlxTensor(reader, m, own(m)) for m in reader.named(".scales"))


class MxFp4Tensor(QuantizedTensor):
    """GPT-OSS's MXFP4: e2m1 numbers of 4 bits, a power of two for every 32.

    One projection of one expert: rows first, first + step, ... of its part of a tensor (experts, rows, ...).
    """

    exact_format = nearest_format = "fp4-32"

    def __init__(self, reader: TensorReader, base: str, module: str, expert: int, first: int, step: int) -> None:
        names = f"{base}_blocks", f"{base}_scales"
        codes, exponents = (reader.tensors[name].read() for name in names)
        self._codes, self._exponents = codes[expert, first::step], exponents[expert, first::step]
        shape = len(self._codes), MX_BLOCK * codes.shape[2]
        super().__init__(reader, module, "MXFP4", shape, names, len(codes) * step)

    def values(self, lo: int, hi: int) -> F32:
        whole, scales = self.blocks(lo, hi)
        values: F32 = (whole * scales[..., None]).reshape(hi - lo, -1)
        return values

    def blocks(self, lo: int, hi: int) -> tuple[I8, F32]:
        """Twice the numbers, half their scales."""
        packed = self._codes[lo:hi]
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:2], MX_BLOCK)
        exponents = np.minimum(self._exponents[lo:hi], MX_MOST).astype(np.int32) - MX_BIAS
        scales: F32 = np.ldexp(np.float32(1), exponents).astype(np.float32)
        return E2M1_DOUBLED[codes], scales


def mxfp4(reader: TensorReader, settings: Quantization) -> Packed:
    """``experts.gate_up_proj_blocks`` (experts, rows, blocks, 16), and ``_scales``; so down's."""
    found: Packed = {}
    for projection, pieces in EXPERT_PARTS.items():
        for experts in reader.named(f".{projection}_blocks"):
            base = f"{experts}.{projection}"
            codes, exponents = (reader.tensors[f"{base}{end}"].read() for end in ("_blocks", "_scales"))
            if codes.dtype != np.uint8 or codes.ndim != 4 or codes.shape[3] != MX_BLOCK // 2 or not codes.size:
                raise reader.wrong(f"{base}_blocks", "bytes (experts, rows, blocks, 16)")
            if exponents.dtype != np.uint8 or exponents.shape != codes.shape[:3]:
                raise reader.wrong(f"{base}_scales", f"bytes {codes.shape[:3]}")
            found |= _by_name(
                MxFp4Tensor(reader, base, f"{experts}.{e}.{part}", e, first, step)
                for e in range(len(codes))
                for part, first, step in pieces
            )
    return found


METHODS: dict[str, Callable[[TensorReader, Quantization], Packed]] = {
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": compressed,
    "fp8": float8,
    "fbgemm_fp8": float8,
    "bitsandbytes": bitsandbytes,
    "mxfp4": mxfp4,
}


def unpacked(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Returns a checkpoint's tensors as the plain ones that they stand for, packed as its config says.

    Raises ConfigError for a method that can't be read, CheckpointError for tensors that do not fit it.
    """
    method = quantization_method(config)
    if method is None:
        return tensors
    reader = TensorReader(tensors)
    if method == "mlx":
        ours = config["quantization"]
        packed = mlx(reader, Quantization.read(ours, "quantization"), ours)
    else:
        where = "quantization_config"
        packed = METHODS[method](reader, Quantization.read(config[where], where))
    held = {
        part.name for tensor in packed.values() if isinstance(tensor, QuantizedTensor) for part in tensor.parts
    }
    plain = {name: tensor for name, tensor in tensors.items() if name not in held}
    for tensor in plain.values():
        tensor.nearest_format = PLAIN
    kept = {name: tensor for name, tensor in {**packed, **plain}.items() if not IGNORED.search(name)}
    return Tensors(kept, tensors.files, method)


def quantization_method(config: Mapping[str, Any]) -> str | None:
    """Returns a name of METHODS, or mlx; None: plain weights. Raises ConfigError for one that can't be read."""
    raw, ours = config.get("quantization_config"), config.get("quantization")
    method = raw.get("quant_method") if isinstance(raw, dict) else None
    if raw is None and ours is None:
        return None
    if method is None and isinstance(ours, dict):
        return "mlx"
    if not isinstance(method, str) or method not in METHODS:
        raise ConfigError(
            f"config.json: quantization_config: quant_method is {short_repr(method)}; accepted: "
            f"{', '.join(METHODS)}, and mlx's quantization"
        )
    return method


def _by_name(tensors: Iterable[QuantizedTensor]) -> Packed:
    return {tensor.name: tensor for tensor in tensors}
