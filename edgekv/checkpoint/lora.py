"""A LoRA as PEFT saves it: a folder with adapter_config.json and adapter_model.safetensors.

A layer's weight W becomes W + scale * alpha / r * B A (with use_rslora: alpha / sqrt(r)): merged, when it is read,
or beside it, at run time (`edgekv.linear.low_rank`). The config's fan_in_fan_out is not needed: the model family
knows which weights are stored transposed, as PEFT does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from edgekv.checkpoint.merged import Delta, MergedTensors
from edgekv.checkpoint.source import Source, read_config
from edgekv.checkpoint.tensor_set import TensorSet
from edgekv.checkpoint.tensors import DTYPES, FLOATS, TensorFile, to_float32
from edgekv.errors import CheckpointError, ConfigError
from edgekv.files import user_path
from edgekv.models.architecture import Architecture, WeightPart
from edgekv.schema import read, shown
from edgekv.types import TaskProgress

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
HINT = "give a folder that PEFT's save_pretrained wrote"
TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
MODULE_NAME = re.compile(r"\^?[\w.]{1,300}")
PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Of training, in init_lora_weights; the others change the base model's weights too."""
PLAIN_STARTS_TEXT = (
    "true, false, gaussian, eva, orthogonal: others change the base model's weights too; save it again with "
    "PEFT's path_initial_model_for_weight_conversion"
)
REFUSED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "lora_bias": "biases of the LoRA itself",
    "modules_to_save": "modules that are saved whole",
    "trainable_token_indices": "trained token embeddings",
    "target_parameters": "changes of parameters that are no linear layer",
    "layer_replication": "layers that are used twice",
    "alora_invocation_tokens": "LoRA that some tokens switch on",
    "arrow_config": "a choice among several LoRAs",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
}
"""Fields of adapter_config.json that must be false, null or empty -> what they ask for."""

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
class Lora:
    """An opened LoRA: whole, finite, of one rank per layer; whether it fits a model is for `apply` to say.

    folder: where it lies. scale: the user's factor. factors: scale * alpha / r of each module that it changes, by
    the module's name in the model that it was trained on. names: the tensors A and B of each.
    """

    folder: Path
    scale: float
    file: TensorFile
    factors: dict[str, float]
    names: dict[str, tuple[str, str]]

    @classmethod
    def open(cls, given: str | os.PathLike[str]) -> Lora:
        """given: FOLDER or FOLDER:scale. Raises ConfigError or CheckpointError (field lora)."""
        folder, scale = _split(os.fspath(given))
        if not os.path.isfile(folder / CONFIG):
            raise ConfigError(f"{folder}: holds no {CONFIG}; {HINT}", field="lora", value=os.fspath(given))
        config = _read(folder / CONFIG)
        if not os.path.exists(folder / WEIGHTS):
            raise CheckpointError(f"{folder}: holds no {WEIGHTS}; {HINT}, as safetensors", field="lora")
        file = TensorFile(folder / WEIGHTS)
        names = _pairs(file)
        factors = {module: scale * _factor(file, config, module, *pair) for module, pair in names.items()}
        wrong = next((module for module, factor in factors.items() if not math.isfinite(factor)), None)
        if wrong:
            raise ConfigError(
                f"{folder / CONFIG}: the factor of {shown(wrong)} is not finite; {HINT}", field="lora"
            )
        return cls(folder, scale, file, factors, names)

    @property
    def identity(self) -> str:
        """16 hex digits of its weights and factors."""
        factors = json.dumps(self.factors, sort_keys=True).encode()
        return hashlib.sha256(self.file.content_hash().encode() + factors).hexdigest()[:16]

    def __str__(self) -> str:
        """For reports and saved sessions."""
        return f"{self.folder.resolve().name}:{self.scale:g} ({self.identity})"

    def apply(self, source: Source, arch: Architecture) -> Source:
        """The checkpoint with the changes in its weights, and an identity of its own.

        Raises ConfigError or CheckpointError where it was trained on another model.
        """

        def identify(progress: TaskProgress | None) -> str:
            return hashlib.sha256(f"{source.identify(progress)}+{self.identity}".encode()).hexdigest()[:16]

        deltas = self.deltas(arch, source.path)
        for part in (part for linear in arch.linears().values() for part in linear.parts if part.tensor in deltas):
            source.tensors.require_shape(part.tensor, part.shape)
        merged = TensorSet([MergedTensors(source.tensors, deltas)])
        return dataclasses.replace(source, tensors=merged, identify=identify)

    def deltas(self, arch: Architecture, place: Path) -> dict[str, Delta]:
        """What is added to the checkpoint's tensors, by their names. place: of the model, for errors.

        Raises ConfigError where it was trained on another model.
        """
        known = _modules(arch)
        deltas: dict[str, Delta] = {}
        for module, (a, b) in self.names.items():
            part = known.get(module)
            if part is None or part.tensor in deltas:
                raise self._foreign(module, arch, part)
            shapes = self.file.info(a).shape, self.file.info(b).shape
            if (shapes[1][0], shapes[0][1]) != (part.rows, part.columns):
                raise ConfigError(
                    f"{self.file.path}: A {shapes[0]} and B {shapes[1]} of {shown(module)} change a weight of "
                    f"{(shapes[1][0], shapes[0][1])}, in {place} it is {(part.rows, part.columns)}; give "
                    "the model that the LoRA was trained on",
                    field="lora",
                )
            deltas[part.tensor] = Delta(self.file, a, b, self.factors[module], part.rows, part.conv1d)
        return deltas

    def refuse_store(self, store: Path) -> ConfigError:
        """The error for a weight store, which holds its weights rounded."""
        return ConfigError(
            f"{self.folder}: a LoRA without a name goes into the weights before a store is made, and "
            f"{store} is a store; give it a name, so that it is applied at run time, or give the original "
            "checkpoint, or a store of both by `edgekv quantize --lora` and no `lora`",
            field="lora",
        )

    def _foreign(self, module: str, arch: Architecture, part: WeightPart | None) -> ConfigError:
        if part is not None:
            why = "changes the same weight as another of its modules"
        elif module.endswith("lm_head") and arch.config.tied_embeddings:
            why = "is the head, whose tensor is also the model's embedding: a change of one alone can't be merged"
        else:
            names = sorted({name.rpartition(".")[2] for name in _modules(arch)})
            why = f"is no linear layer of this {arch.config.model_type} model; those are {', '.join(names)}"
        return ConfigError(f"{self.file.path}: the module {shown(module)} {why}", field="lora")


def _modules(arch: Architecture) -> dict[str, WeightPart]:
    """The linear layers by each name that a module may have: with a prefix of the family, or as a text model."""
    found: dict[str, WeightPart] = {}
    tied = {tensor for tensor, _ in arch.tables().values()}
    for part in (part for linear in arch.linears().values() for part in linear.parts if part.tensor not in tied):
        name = part.tensor.removesuffix(".weight")
        found[name] = part
        if part.tensor == arch.head_tensor:
            found["lm_head"] = part
        elif name.startswith(arch.prefix):
            found |= {f"{prefix}{name[len(arch.prefix) :]}": part for prefix in (*arch.prefixes, "model.", "")}
    return found


def _split(given: str) -> tuple[Path, float]:
    """The folder, and the scale behind the last colon, 1 without one."""
    whole = user_path(given)
    folder, colon, text = given.rpartition(":")
    if not colon or os.path.isdir(whole):
        return whole, 1.0
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not math.isfinite(scale):
        raise ConfigError(
            f"lora={given!r}: the scale {text!r} is no finite number; accepted: FOLDER or FOLDER:scale",
            field="lora",
            value=given,
            accepted=["FOLDER", "FOLDER:scale"],
        )
    return user_path(folder), scale


def _read(path: Path) -> LoraFile:
    """adapter_config.json, of a LoRA that can be merged."""
    raw = read_config(path)
    config = read(raw, LoraFile, str(path), HINT)
    for field, value, accepted in _unmergeable(raw, config):
        raise ConfigError(f"{path}: {field} is {shown(value)}; accepted: {accepted}", field="lora", value=value)
    return config


def _unmergeable(raw: dict[str, Any], config: LoraFile) -> Iterator[tuple[str, object, str]]:
    """Each field that asks for what can't be merged, its value, and what is accepted."""
    if config.peft_type != "LORA":
        yield "peft_type", config.peft_type, "LORA"
    if config.bias != "none":
        yield "bias", config.bias, "none: trained biases can't be merged here"
    if config.init_lora_weights not in PLAIN_STARTS:
        yield "init_lora_weights", config.init_lora_weights, PLAIN_STARTS_TEXT
    for name, what in REFUSED.items():
        if raw.get(name):
            yield name, raw[name], f"none: {what} can't be merged here"
    for name, pattern in (("rank_pattern", config.rank_pattern), ("alpha_pattern", config.alpha_pattern)):
        for key in pattern:
            if not MODULE_NAME.fullmatch(key):
                yield name, key, "names of modules or ends of them; other regular expressions are not read"


def _pairs(file: TensorFile) -> dict[str, tuple[str, str]]:
    """The names of A and B of each module, all of them finite matrices."""
    halves: dict[str, dict[str, str]] = {}
    for name in file.names():
        found, info = TENSOR.fullmatch(name), file.info(name)
        if found is None:
            raise _wrong(file, name, "is neither lora_A nor lora_B of a linear layer and can't be merged")
        if len(info.shape) != 2 or not all(info.shape) or DTYPES.get(info.dtype) not in FLOATS:
            raise _wrong(file, name, f"is {info.dtype} {info.shape}; accepted: matrices of F64, F32, F16 or BF16")
        with np.errstate(over="ignore"):  # of F64
            finite = np.isfinite(to_float32(file.array(name))).all()
        file.release(name)
        if not finite:
            raise _wrong(file, name, "has values that are not finite; train it again")
        if halves.setdefault(found[1], {}).setdefault(found[2], name) != name:
            raise _wrong(file, name, "is there twice, with and without the adapter's name")
    if not halves:
        raise CheckpointError(f"{file.path}: holds no tensors; {HINT}", field="lora")
    for half in halves.values():
        if len(half) != 2:
            raise _wrong(file, next(iter(half.values())), "comes without its other half")
    return {module: (half["A"], half["B"]) for module, half in halves.items()}


def _factor(file: TensorFile, config: LoraFile, module: str, a: str, b: str) -> float:
    """alpha / r of a module, whose tensors have that rank."""
    rank = config.rank_pattern.get(_key(config.rank_pattern, module), config.r)
    alpha = config.alpha_pattern.get(_key(config.alpha_pattern, module), config.lora_alpha)
    found = file.info(a).shape[0], file.info(b).shape[1]
    if found != (rank, rank):
        raise CheckpointError(
            f"{file.path}: A and B of {shown(module)} have the ranks {found[0]} and {found[1]}, {CONFIG} says "
            f"{rank}; {HINT}",
            field="lora",
        )
    return alpha / (math.sqrt(rank) if config.use_rslora else rank)


def _key(pattern: Mapping[str, object], module: str) -> str:
    """The first key that is the module's name or its end, as PEFT chooses it; with ^ it is the whole name."""
    ends = (key for key in pattern if module == key.removeprefix("^") or module.endswith(f".{key}"))
    return next(ends, "")


def _wrong(file: TensorFile, name: str, what: str) -> CheckpointError:
    return CheckpointError(f"{file.path}: tensor {shown(name)} {what}", field="lora")
