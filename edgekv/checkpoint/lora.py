"""A LoRA as PEFT saves it: a folder with adapter_config.json and adapter_model.safetensors.

A layer's weight W becomes W + scale * alpha / r * B A (with use_rslora: alpha / sqrt(r)): merged when it is read,
or applied at run time (`edgekv.weights.ops`). The config's fan_in_fan_out is ignored, as the model family knows
which weights are stored transposed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from edgekv.checkpoint.checkpoint import Checkpoint, read_config
from edgekv.checkpoint.tensors import DTYPES, FLOATS, Tensor, Tensors, to_float32
from edgekv.checks import read_fields
from edgekv.errors import CheckpointError, ConfigError, short_repr
from edgekv.files import user_path
from edgekv.models.architecture import Architecture, WeightPart
from edgekv.types import F32, Array, TaskProgress

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
HINT = "give a folder that PEFT's save_pretrained wrote"
TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
MODULE_NAME = re.compile(r"\^?[\w.]{1,300}")
PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base model's weights as they are."""
REFUSED = re.compile(
    "use_(do|qalo|bdlo)ra|lora_bias|modules_to_save|trainable_token_indices|target_parameters|layer_replication|"
    "alora_invocation_tokens|(arrow|kasa|monteclora|velora)_config"
)
"""Fields of adapter_config.json that must be false, null or empty, as they can't be merged."""

T = TypeVar("T")
Rank = Annotated[int, Meta(ge=1, le=1 << 16)]


class LoraFile(msgspec.Struct):
    """The fields of adapter_config.json that are read."""

    peft_type: str
    r: Rank = 8
    lora_alpha: float = 8.0
    use_rslora: bool = False
    bias: str = "none"
    init_lora_weights: bool | str = True
    rank_pattern: dict[str, Rank] = {}
    alpha_pattern: dict[str, float] = {}


@dataclasses.dataclass(frozen=True)
class Delta:
    """The change factor * B A of a projection.

    a: A (rank, inputs). b: B (outputs, rank). transposed: whether the checkpoint stores (inputs, outputs).
    """

    a: Tensor
    b: Tensor
    factor: float
    transposed: bool

    def matrices(self) -> tuple[F32, F32]:
        """Returns A (rank, inputs) and factor * B (outputs, rank), float32, which overflows for a huge factor."""
        with np.errstate(over="ignore"):
            b: F32 = to_float32(self.b.read()) * np.float32(self.factor)
        return to_float32(self.a.read()), b


class LoraTensor(Tensor):
    """A tensor to which a `Delta` is added, in float32, when it is read."""

    exact_format = "f32"

    def __init__(self, inner: Tensor, delta: Delta) -> None:
        super().__init__(inner.path, inner.name, "F32", inner.shape, inner.nbytes)
        self.kind, self._inner, self._delta = inner.kind, inner, delta
        self.nearest_format = "f32" if inner.kind is None else "int8-32"

    def read(self) -> Array:
        """Returns all changed values (rows, columns)."""
        outputs = self.rows(0, self._delta.b.shape[0], self._delta.transposed)
        return outputs.T if self._delta.transposed else outputs

    def rows(self, lo: int, hi: int, transposed: bool = False) -> Array:
        rows = self._inner.rows(lo, hi, transposed)
        a, b = (to_float32(matrix) for matrix in (self._delta.a.read(), self._delta.b.read()[lo:hi]))
        with np.errstate(over="ignore", invalid="ignore"):  # is checked below
            merged: F32 = (b @ a) * np.float32(self._delta.factor)
            merged += to_float32(rows)
        if not np.isfinite(merged).all():
            problem = f"is not finite with the LoRA of {self._delta.a.path} in it"
            raise _tensor_error(self, problem, "give a smaller scale, or another {lora}")
        return merged

    def release(self) -> None:
        self._inner.release()


@dataclasses.dataclass(frozen=True)
class Lora:
    """An opened LoRA, complete and finite; `apply` checks that it fits a model.

    folder: its folder. scale: the user's factor. factors: scale * alpha / r of each module, by the module's name
    in the model it was trained on. pairs: the tensors A and B of each module.
    """

    folder: Path
    scale: float
    tensors: Tensors
    factors: dict[str, float]
    pairs: dict[str, tuple[Tensor, Tensor]]

    @classmethod
    def open(cls, spec: str | os.PathLike[str]) -> Lora:
        """Opens FOLDER or FOLDER:scale. Raises ConfigError or CheckpointError (field lora)."""
        folder, scale = _split(os.fspath(spec))
        if not os.path.isfile(folder / CONFIG):
            raise _lora_error(f"{folder}: holds no {CONFIG}; {HINT}")
        config = _read(folder / CONFIG)
        if not os.path.exists(folder / WEIGHTS):
            raise CheckpointError(f"{folder}: holds no {WEIGHTS}; {HINT}, as safetensors", field="lora")
        tensors = Tensors.open(folder / WEIGHTS)
        pairs = _pairs(tensors)
        factors = {module: scale * _factor(config, module, *pair) for module, pair in pairs.items()}
        for module, factor in factors.items():
            if not math.isfinite(factor):
                raise _lora_error(f"{folder / CONFIG}: the factor of {short_repr(module)} is not finite; {HINT}")
        return cls(folder, scale, tensors, factors, pairs)

    @property
    def identity(self) -> str:
        """A hash of its weights and factors, 16 hex digits."""
        factors = json.dumps(self.factors, sort_keys=True).encode()
        return hashlib.sha256(self.tensors.files[0].content_hash().encode() + factors).hexdigest()[:16]

    def __str__(self) -> str:
        """Returns folder, scale and identity, for reports and saved sessions."""
        return f"{self.folder.resolve().name}:{self.scale:g} ({self.identity})"

    def apply(self, source: Checkpoint, arch: Architecture) -> Checkpoint:
        """Returns the checkpoint with changed weights and another identity.

        Raises ConfigError or CheckpointError if the LoRA was trained on another model.
        """

        def identify(progress: TaskProgress | None) -> str:
            return hashlib.sha256(f"{source.identify(progress)}+{self.identity}".encode()).hexdigest()[:16]

        deltas, shapes = self.deltas(arch, source.path), arch.tensors()
        originals = {name: source.tensors.require(name, shapes[name]) for name in deltas}
        merged = {name: LoraTensor(originals[name], delta) for name, delta in deltas.items()}
        return dataclasses.replace(source, tensors=source.tensors.with_tensors(merged), identify=identify)

    def deltas(self, arch: Architecture, model_path: Path) -> dict[str, Delta]:
        """Returns the changes of a checkpoint's tensors, by their names. model_path: for errors.

        Raises ConfigError if the LoRA was trained on another model.
        """
        layers, deltas = _modules(arch), dict[str, Delta]()
        for module, (a, b) in self.pairs.items():
            part, changed, wrong = layers.get(module), (b.shape[0], a.shape[1]), ""
            if part is None and module.endswith("lm_head") and arch.config.tied_embeddings:
                wrong = "is the head, whose tensor is also the model's embedding: it can't be changed alone"
            elif part is None:
                names = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
                wrong = f"is no linear layer of this {arch.config.model_type} model; those are {names}"
            elif part.tensor in deltas:
                wrong = "changes the same weight as another of its modules"
            elif changed != (part.rows, part.columns):
                wrong = (
                    f"has A {a.shape} and B {b.shape}, which change a weight of {changed}; in {model_path} it is "
                    f"{(part.rows, part.columns)}: give the model that the LoRA was trained on"
                )
            if part is None or wrong:
                raise _lora_error(f"{self.tensors.path}: the module {short_repr(module)} {wrong}")
            deltas[part.tensor] = Delta(a, b, self.factors[module], part.conv1d)
        return deltas

    def refuse_store(self, store: Path) -> ConfigError:
        """Returns the error for a weight store, whose weights are rounded already."""
        return _lora_error(
            f"{self.folder}: a LoRA without a name goes into the weights before a store is made, and {store} "
            "is a store",
            "give it a name, so that it is applied at run time, or give the original checkpoint, or a store of "
            "both by `edgekv quantize --lora` and no {lora}",
        )


def _lora_error(problem: str, advice: str = "") -> ConfigError:
    return ConfigError(problem, field="lora", advice=advice)


def _modules(arch: Architecture) -> dict[str, WeightPart]:
    """Returns the linear layers by each name that PEFT may give a module."""
    modules: dict[str, WeightPart] = {}
    tied = {tensor for tensor, _ in arch.tables().values()}
    for part in (part for linear in arch.linears().values() for part in linear.parts if part.tensor not in tied):
        name = part.tensor.removesuffix(".weight")
        modules[name] = part
        if part.tensor == arch.head_tensor:
            modules["lm_head"] = part
        elif name.startswith(arch.prefix):
            modules |= {f"{prefix}{name[len(arch.prefix) :]}": part for prefix in (*arch.prefixes, "model.", "")}
    return modules


def _split(spec: str) -> tuple[Path, float]:
    """Returns the folder, and the scale after the last colon, 1 without one."""
    path = user_path(spec)
    folder, colon, text = spec.rpartition(":")
    if not colon or os.path.isdir(path):
        return path, 1.0
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not math.isfinite(scale):
        problem = f"the scale {text!r} is no finite number"
        raise ConfigError(problem, field="lora", value=spec, accepted=["FOLDER:scale"])
    return user_path(folder), scale


def _read(path: Path) -> LoraFile:
    """Reads adapter_config.json. Raises ConfigError for fields that can't be merged."""
    raw = read_config(path)
    config = read_fields(raw, LoraFile, str(path), HINT)
    wrong = {name: "none: this can't be merged here" for name in raw if REFUSED.fullmatch(name) and raw[name]}
    if config.peft_type != "LORA":
        wrong["peft_type"] = "LORA"
    if config.bias != "none":
        wrong["bias"] = "none: trained biases can't be merged here"
    if config.init_lora_weights not in PLAIN_STARTS:
        wrong["init_lora_weights"] = (
            "true, false, gaussian, eva, orthogonal: others change the base model's weights too; save it again "
            "with PEFT's path_initial_model_for_weight_conversion"
        )
    for name in ("rank_pattern", "alpha_pattern"):
        if not all(map(MODULE_NAME.fullmatch, getattr(config, name))):
            wrong[name] = "names of modules or ends of them; other regular expressions are not read"
    for name, accepted in wrong.items():
        raise _lora_error(f"{path}: {name} is {short_repr(raw[name])}; accepted: {accepted}")
    return config


def _pairs(tensors: Tensors) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns the finite matrices A and B of each module."""
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = TENSOR.fullmatch(name)
        if match is None:
            raise _tensor_error(tensor, "is neither lora_A nor lora_B of a linear layer and can't be merged")
        if len(tensor.shape) != 2 or not all(tensor.shape) or DTYPES.get(tensor.dtype) not in FLOATS:
            problem = f"is {tensor.dtype} {tensor.shape}; accepted: matrices of F64, F32, F16 or BF16"
            raise _tensor_error(tensor, problem)
        with np.errstate(over="ignore"):  # of F64
            finite = np.isfinite(to_float32(tensor.read())).all()
        tensor.release()
        if not finite:
            raise _tensor_error(tensor, "has values that are not finite; train it again")
        if halves.setdefault(match[1], {}).setdefault(match[2], tensor) is not tensor:
            raise _tensor_error(tensor, "is there twice, with and without the adapter's name")
    if not halves:
        raise CheckpointError(f"{tensors.path}: holds no tensors; {HINT}", field="lora")
    for half in halves.values():
        if len(half) != 2:
            raise _tensor_error(next(iter(half.values())), "comes without its other half")
    return {module: (half["A"], half["B"]) for module, half in halves.items()}


def _factor(config: LoraFile, module: str, a: Tensor, b: Tensor) -> float:
    """Returns alpha / r of a module. Raises CheckpointError if its tensors have another rank."""
    rank = _matching_value(config.rank_pattern, module, config.r)
    alpha = _matching_value(config.alpha_pattern, module, config.lora_alpha)
    ranks = a.shape[0], b.shape[1]
    if ranks != (rank, rank):
        problem = f"A and B of {short_repr(module)} have the ranks {ranks[0]} and {ranks[1]}, {CONFIG} says {rank}"
        raise CheckpointError(f"{a.path}: {problem}; {HINT}", field="lora")
    return alpha / (math.sqrt(rank) if config.use_rslora else rank)


def _matching_value(pattern: Mapping[str, T], module: str, default: T) -> T:
    """Returns the first value whose key is the module's name or its end, as PEFT does; with ^, the whole name."""
    values = (v for key, v in pattern.items() if module == key.removeprefix("^") or module.endswith(f".{key}"))
    return next(values, default)


def _tensor_error(tensor: Tensor, problem: str, advice: str = "") -> CheckpointError:
    problem = f"{tensor.path}: tensor {short_repr(tensor.name)} {problem}"
    return CheckpointError(problem, field="lora", advice=advice)
