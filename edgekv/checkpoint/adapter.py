"""Adapters: small .safetensors files with what was trained for one KV scheme and one checkpoint.

a name without a dot     F32 () or (n_layers, ...): a parameter of the scheme, which its `load_adapter` checks
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


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An opened adapter; its weights are mapped and not read.

    base: the identity of its checkpoint. scheme: the name of its KV scheme. parameters: the scheme's, as stored.
    weights: the names of the checkpoint's tensors that it replaces.
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
        parameters = {name: to_float32(tensors[name].read()) for name in tensors if "." not in name}
        if not parameters:
            raise ConfigError(
                f"{path}: has no parameter of the scheme {metadata['scheme']}; write the adapter again"
            )
        for name, array in parameters.items():
            if not np.isfinite(array).all():
                raise ConfigError(f"{path}: {name} has values that are not finite; train the adapter again")
        weights = tuple(name for name in tensors if name not in parameters)
        return cls(tensors, metadata["base"], metadata["scheme"], parameters, weights)

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
        """The identity of the adapted checkpoint: the base's own if the adapter has numbers of heads alone."""
        if not self.weights and all(array.ndim <= 2 for array in self.parameters.values()):
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
        for name, array in self.parameters.items():
            if array.ndim and len(array) != config.n_layers:
                raise self._error(f"{name} has shape {array.shape}; accepted: () or ({config.n_layers}, ...)")

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
