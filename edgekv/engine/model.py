"""An opened model: its weights and their bytes, its LoRAs and its sampling defaults."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from edgekv.checkpoint.adapter import Adapter
from edgekv.checkpoint.checkpoint import holds_tokenizer, open_checkpoint, read_config
from edgekv.checkpoint.hub import cached_model_name, find_model
from edgekv.checkpoint.lora import Delta, Lora
from edgekv.engine.sampling import SamplingParams
from edgekv.errors import ConfigError
from edgekv.files import user_path
from edgekv.models import architecture
from edgekv.models.architecture import Architecture
from edgekv.models.config import ModelConfig
from edgekv.models.llava import image_token
from edgekv.types import Path, TaskProgress
from edgekv.weights.checkpoint_weights import CheckpointWeights
from edgekv.weights.formats import ModelFormat, idle_bytes, specs_bytes, store_specs, weight_format
from edgekv.weights.ops import LoraDeltas, low_rank, low_rank_bytes
from edgekv.weights.store import WeightStore, is_store, open_or_build

SAMPLED = "temperature", "top_k", "top_p", "min_p", "repetition_penalty"  # fields of generation_config.json


@dataclasses.dataclass(frozen=True)
class Model:
    """An opened checkpoint or weight store; nothing large has been read yet.

    raw_config: its config.json. adapter: weights in place of the checkpoint's. lora: merged into the weights.
    loras: by name, beside the weights, for conversations that choose one.
    """

    path: pathlib.Path
    raw_config: dict[str, Any]
    tokenizer_path: pathlib.Path | None
    weights: CheckpointWeights | WeightStore
    adapter: Adapter | None = None
    lora: Lora | None = None
    loras: Mapping[str, Lora] = dataclasses.field(default_factory=dict)

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        config: Path | None = None,
        tokenizer: Path | None = None,
        adapter: Path | None = None,
        lora: Path | None = None,
        loras: Mapping[str, Path] = {},
    ) -> Model:
        """Opens a model by the path and options of `Session.load`, and checks every tensor's shape.

        Raises CheckpointError or ConfigError.
        """
        model_path, tokenizer_path = find_model(path), user_path(tokenizer) if tokenizer else None
        adapted = Adapter.open(adapter) if adapter is not None else None
        merged = Lora.open(lora) if lora is not None else None
        if is_store(model_path):
            if merged:
                raise merged.refuse_store(model_path)
            store = WeightStore(model_path)
            if adapted:
                adapted.require_store(store.identity, model_path)
            tokenizer_path = tokenizer_path or (model_path if holds_tokenizer(model_path) else None)
            model = cls(model_path, store.config, tokenizer_path, store, adapted)
        else:
            source = open_checkpoint(model_path, config=config, tokenizer=tokenizer)
            arch = architecture(source.config, source.tensors)
            source = merged.apply(source, arch) if merged else source
            source = adapted.apply(source) if adapted else source
            tokenizer_path, weights = tokenizer_path or source.tokenizer_folder, CheckpointWeights(source, arch)
            model = cls(model_path, source.config, tokenizer_path, weights, adapted, merged)
        if adapted:
            adapted.require_shape(model.config)
        named = {name: Lora.open(folder) for name, folder in loras.items()}
        for named_lora in named.values():
            named_lora.deltas(model.arch, model_path)  # raises for one that does not fit
        return dataclasses.replace(model, loras=named)

    @property
    def name(self) -> str:
        """The name on the Hub, else of the file or folder; for people."""
        return cached_model_name(self.path) or self.path.name

    @property
    def identity(self) -> str:
        """The hash of config and weights by which sessions and stores know the model: 16 hex digits."""
        if self.adapter is not None:
            return self.adapter.identity
        weights = self.weights
        return weights.source.identity if isinstance(weights, CheckpointWeights) else weights.identity

    @property
    def adapted_identity(self) -> str:
        """The identity of the model with its adapter, if any."""
        if self.adapter is None:
            return self.identity
        return hashlib.sha256((self.identity + self.adapter.content_hash).encode()).hexdigest()[:16]

    @property
    def loras_bytes(self) -> int:
        """The bytes of the matrices of ``loras`` in memory."""
        return sum(low_rank_bytes(self.arch, self._deltas(lora)) for lora in self.loras.values())

    def lora_deltas(self, name: str) -> LoraDeltas:
        """Reads one of ``loras``. Raises CheckpointError where it is not finite."""
        return low_rank(self.arch, self._deltas(self.loras[name]))

    def _deltas(self, lora: Lora) -> dict[str, Delta]:
        return lora.deltas(self.arch, self.path)

    def lora_text(self, name: str | None) -> str | None:
        """Names the LoRA in the weights and one of ``loras``, for reports and files; None: there is none."""
        merged = [] if self.lora is None else [str(self.lora)]
        beside = [] if name is None else [f"{self.loras[name]} beside the weights"]
        return " and ".join(merged + beside) or None

    @property
    def arch(self) -> Architecture:
        """The names and shapes of its weights, and its blocks."""
        return self.weights.arch

    @property
    def config(self) -> ModelConfig:
        """The shape and constants of its decoder."""
        return self.arch.config

    @property
    def text_config(self) -> dict[str, Any]:
        """The config.json, with a multimodal model's "text_config" at the top level."""
        text = self.raw_config.get("text_config")
        return {**(text if isinstance(text, dict) else {}), **self.raw_config}

    @property
    def image_token(self) -> int | None:
        """The token in a prompt that stands for an image; None: the model takes none."""
        return image_token(self.raw_config)

    @property
    def placeholder(self) -> int:
        """The token that stands for a position which holds an embedding."""
        token = self.image_token
        return token if token is not None and token < self.config.vocab_size else 0

    @functools.cached_property
    def sampling(self) -> SamplingParams:
        """The settings of the generation_config.json beside the weights, else those of `SamplingParams`.

        Raises ConfigError where the file can't be read, or has values that `SamplingParams` refuses.
        """
        path = (self.path if self.path.is_dir() else self.path.parent) / "generation_config.json"
        config = read_config(path) if path.is_file() else {}
        values = {name: config[name] for name in SAMPLED if config.get(name) is not None}
        if config.get("do_sample") is False:
            values["temperature"] = 0.0
        try:
            return SamplingParams(**values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}", field=error.field) from None

    @property
    def is_store(self) -> bool:
        """Whether it was opened as a weight store."""
        return isinstance(self.weights, WeightStore)

    @property
    def quantized(self) -> tuple[str, ...]:
        """The types of quantized weights, as their formats call them: "GPTQ 4-bit", "Q4_0"; of a store its own."""
        kinds = self.weights.kinds if isinstance(self.weights, CheckpointWeights) else (self.weights.form.name,)
        return tuple(kind for kind in kinds if kind != "f32")

    @property
    def calibration(self) -> str | None:
        """The text with which a store's weights were rounded; None: without one."""
        return self.weights.calibration if isinstance(self.weights, WeightStore) else None

    @property
    def n_parameters(self) -> int:
        """The number of weights; a tied embedding counts once."""
        tables = sum(rows * columns for _, (rows, columns) in self.arch.tables().values())
        linears = self.arch.linears()
        if self.config.tied_embeddings:
            linears.pop("head")
        biases = sum(linear.rows for linear in linears.values() if linear.biases)
        vectors = sum(size for _, size in self.arch.vectors().values())
        arrays = sum(math.prod(shape) for _, shape in self.arch.arrays().values())
        return tables + arrays + sum(linear.n_elements for linear in linears.values()) + biases + vectors

    def summary(self) -> dict[str, Any]:
        """Returns name, size and shapes, for a report."""
        names = ("n_layers", "hidden_size", "n_heads", "n_kv_heads", "head_dim", "vocab_size", "max_positions")
        return {
            "name": self.name,
            "model_type": self.config.model_type,
            "n_parameters": self.n_parameters,
            "identity": self.identity,
            **{name: getattr(self.config, name) for name in names},
        }

    def weight_format(self, name: str) -> ModelFormat:
        """Returns the weight format that ``name`` means for this model. Raises ConfigError (field weights)."""
        if isinstance(self.weights, CheckpointWeights):
            return weight_format(name, self.arch, self.weights.own_format)
        if name not in ("auto", self.weights.form.name):
            raise ConfigError(
                f"{self.path} is a store of {self.weights.form.name} weights",
                field="weights",
                value=name,
                accepted=["auto", self.weights.form.name],
                advice="or give the original checkpoint",
            )
        return self.weights.form

    def weights_note(self, form: ModelFormat) -> str | None:
        """Returns a line on weights that this format quantizes a second time, or None."""
        lost = self.weights.requantized(form) if isinstance(self.weights, CheckpointWeights) else set()
        if not lost:
            return None
        kinds, formats = (sorted(set(names)) for names in zip(*lost, strict=True))
        hint = "" if formats == ["int8-32"] else "; int8-32 loses least"
        return f"weights of type {', '.join(kinds)} were quantized a second time, to {' and '.join(formats)}{hint}"

    def weights_bytes(self, form: ModelFormat) -> int:
        """Returns the bytes of a store in this format, which decoding maps."""
        return specs_bytes(store_specs(self.arch, form, self.weights.table_dtypes))

    def idle_bytes(self, form: ModelFormat) -> int:
        """Returns the bytes of the experts that a token does not use, which stay in the mapped file."""
        return idle_bytes(self.arch, store_specs(self.arch, form, self.weights.table_dtypes))

    def store(self, form: ModelFormat, progress: TaskProgress | None = None) -> WeightStore:
        """Opens the weights as a store; a checkpoint's is built in the cache folder at the first call."""
        if isinstance(self.weights, WeightStore):
            return self.weights
        return open_or_build(self.weights, form, progress)
