"""Adapters: small .safetensors files with what was trained for one KV scheme and one checkpoint.

tau, or key_scale        F32 (), (n_layers,) or (n_layers, heads): a parameter of the scheme, see SETTINGS
projection, centre       F32 (n_layers, ...): further parameters of h1b, see LEARNED
a checkpoint's tensor    its replacement, under the same name (V_proj; the whole c_attn of a GPT-2)
`__metadata__`           format, version, base (the checkpoint's identity), scheme; and provenance
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgekv.checkpoint.checkpoint import Checkpoint
from edgekv.checkpoint.tensors import DTYPES, FLOATS, Tensors, to_float32
from edgekv.errors import ConfigError
from edgekv.files import user_path
from edgekv.models.config import ModelConfig
from edgekv.types import F32

FORMAT, VERSION = "edgekv-adapter", "1"
SETTINGS = {"tau": "n_heads", "key_scale": "n_kv_heads"}
"""The parameter that a scheme learns, and the config's field with its number of heads. tau: the softmax
temperature of h1b's query heads; key_scale: the scale of onebit's estimated scores per KV head."""
LEARNED = ("projection", "centre")
"""h1b's projection R (n_layers, sketch_bits, head_dim), and mean keys (n_layers, n_kv_heads, head_dim)."""


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An opened adapter; its weights are mapped and not read.

    base: the identity of its checkpoint. scheme: the name of its KV scheme. parameters: one of SETTINGS, and those
    of LEARNED that it has, as stored. weights: the names of the checkpoint's tensors that it replaces.
    """

    tensors: Tensors
    base: str
    scheme: str
    parameters: dict[str, F32]
    weights: tuple[str, ...]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Adapter:
        """Opens a file. Raises CheckpointError if it is no safetensors file, ConfigError if it is no adapter."""
        tensors = Tensors.open(user_path(path))
        metadata = tensors.files[0].metadata
        written = f"{metadata.get('format')}, version {metadata.get('version')}"
        if written != f"{FORMAT}, version {VERSION}":
            raise ConfigError(f"{path}: has the format {written}", accepted=[f"{FORMAT}, version {VERSION}"])
        for name in ("base", "scheme"):
            if name not in metadata:
                raise ConfigError(f"{path}: its __metadata__ does not say {name!r}; write the adapter again")
        for tensor in tensors.values():
            if DTYPES.get(tensor.dtype) not in FLOATS:
                accepted = ["F64", "F32", "F16", "BF16"]
                raise ConfigError(f"{path}: tensor {tensor.name!r} is {tensor.dtype}", accepted=accepted)
        settings = [name for name in SETTINGS if name in tensors]
        if len(settings) != 1:
            raise ConfigError(
                f"{path}: has {len(settings)} of the tensors {', '.join(SETTINGS)}; it must have one"
            )
        setting, value = settings[0], to_float32(tensors[settings[0]].read())
        if not (np.isfinite(value) & (value > 0)).all():
            raise ConfigError(f"{path}: {setting} must be positive everywhere, its least value is {value.min()}")
        learned = {name: to_float32(tensors[name].read()) for name in LEARNED if name in tensors}
        for name, array in learned.items():
            if array.ndim != 3 or not np.isfinite(array).all():
                raise ConfigError(f"{path}: {name} is {array.shape}; accepted: layers first of 3 axes, finite")
        weights = tuple(name for name in tensors if name not in (setting, *learned))
        return cls(tensors, metadata["base"], metadata["scheme"], {setting: value} | learned, weights)

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self.tensors.path

    @property
    def content_hash(self) -> str:
        """The hash of the file."""
        return self.tensors.files[0].content_hash()

    @property
    def identity(self) -> str:
        """The identity of the adapted checkpoint: the base's own if the adapter has one of SETTINGS only."""
        if not self.weights and len(self.parameters) == 1:
            return self.base
        return hashlib.sha256((self.base + self.content_hash).encode()).hexdigest()[:16]

    def apply(self, source: Checkpoint) -> Checkpoint:
        """Returns the checkpoint with the adapter's weights. Raises ConfigError for another checkpoint."""
        self._require_base(source.identity)
        for name in self.weights:
            if name not in source.tensors:
                raise self._error(f"tensor {name!r} is not in {source.path}, whose names are accepted")
            shape, expected = self.tensors[name].shape, source.tensors[name].shape
            if shape != expected:
                raise self._error(f"tensor {name!r} has shape {shape}, in {source.path} it has {expected}")
        tensors = source.tensors.with_tensors({name: self.tensors[name] for name in self.weights})
        return dataclasses.replace(source, tensors=tensors, identify=lambda progress: self.identity)

    def require_store(self, identity: str, folder: Path) -> None:
        """Raises ConfigError if a weight store does not hold the adapted weights."""
        if identity != self.identity:
            self._require_base(identity)
            if not self.weights:
                return
            raise self._error(
                f"replaces {len(self.weights)} tensors, which the store {folder} holds quantized; give the "
                "original checkpoint, or a store made from it with `edgekv quantize --adapter`"
            )

    def require_scheme(self, scheme: str) -> None:
        """Raises ConfigError if the adapter was trained for another scheme."""
        if self.scheme != scheme:
            raise ConfigError(
                f"{self.path} was trained for another scheme",
                field="kv",
                value=scheme,
                accepted=[self.scheme],
                advice="or leave {adapter} out",
            )

    def require_shape(self, config: ModelConfig) -> None:
        """Raises ConfigError if the parameters don't fit the model's shape."""
        if config.recurrences:
            raise self._error(f"an adapter is for models whose layers all attend; {config.model_type} has others")
        n_layers = config.n_layers
        for name, array in self.parameters.items():
            if name in SETTINGS:
                accepted = (), (n_layers,), (n_layers, getattr(config, SETTINGS[name]))
                if array.shape not in accepted:
                    raise self._error(f"{name} has shape {array.shape}; accepted: {', '.join(map(str, accepted))}")
            elif len(array) != n_layers:
                raise self._error(f"{name} is of {len(array)} layers; accepted: {n_layers}")

    def adapt(self, caches: Sequence[Any]) -> None:
        """Sets the parameters of each layer's cache."""
        for layer, cache in enumerate(caches):
            parameters = {name: np.atleast_1d(a[layer]) if a.ndim else a for name, a in self.parameters.items()}
            cache.load_adapter(parameters, f"adapter {self.path.name}")

    def _require_base(self, identity: str) -> None:
        if identity != self.base:
            raise self._error(
                f"belongs to the checkpoint with identity {self.base}, this one has {identity}; give the "
                "model that it was trained on"
            )

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self.path}: {problem}")
