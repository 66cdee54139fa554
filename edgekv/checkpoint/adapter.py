"""An adapter: what training for one KV scheme changes in one checkpoint, in a small .safetensors file.

tau, or key_scale        F32 (), (n_layers,) or (n_layers, heads): what the scheme learns, as in SETTINGS
projection, centre       F32 (n_layers, ...): what else h1b may learn, as in LEARNED
any checkpoint tensor    under its own name: its replacement (V_proj; the whole c_attn of a GPT-2)
`__metadata__`           format, version, base (the checkpoint's identity), scheme; the rest is provenance
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
"""What a scheme learns, and the config's field that counts its heads. h1b: the softmax temperature of query heads;
onebit: the scale of the scores that it estimates, of KV heads."""
LEARNED = ("projection", "centre")
"""Of h1b: R (n_layers, sketch_bits, head_dim), and what keys lose before it (n_layers, n_kv_heads, head_dim)."""
FORMER_NAMES = {"lam": "key_scale"}
"""What adapters of before call a setting."""


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An opened adapter; its weights are mapped and not read.

    base: identity of the checkpoint that it belongs to; scheme: name of the KV scheme that it was trained for;
    parameters: what the scheme learns: one of SETTINGS, as stored, and those of LEARNED that it has; weights:
    names of the checkpoint's tensors that it replaces.
    """

    tensors: Tensors
    base: str
    scheme: str
    parameters: dict[str, F32]
    weights: tuple[str, ...]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Adapter:
        """Raises CheckpointError for what is no safetensors file, ConfigError for what is no adapter."""
        tensors = Tensors.open(user_path(path))
        metadata = tensors.files[0].metadata
        found = metadata.get("format"), metadata.get("version")
        stored = [name for name in (*SETTINGS, *FORMER_NAMES) if name in tensors]
        if found != (FORMAT, VERSION):
            raise ConfigError(
                f"{path}: is no adapter that this edgekv reads (format {found[0]}, version {found[1]}); accepted: "
                f"{FORMAT}, version {VERSION}"
            )
        for name in ("base", "scheme"):
            if name not in metadata:
                raise ConfigError(f"{path}: its __metadata__ does not say {name!r}; write the adapter again")
        for tensor in tensors.values():
            if DTYPES.get(tensor.dtype) not in FLOATS:
                what = f"tensor {tensor.name!r} is {tensor.dtype}"
                raise ConfigError(f"{path}: {what}; accepted: F64, F32, F16, BF16")
        if len(stored) != 1:
            has = " and ".join(stored) or f"no tensor {' or '.join(map(repr, SETTINGS))}"
            raise ConfigError(f"{path}: has {has}; an adapter has one of them: write it again")
        setting, value = FORMER_NAMES.get(stored[0], stored[0]), to_float32(tensors[stored[0]].read())
        if not (np.isfinite(value) & (value > 0)).all():
            raise ConfigError(f"{path}: {setting} must be positive everywhere, its least value is {value.min()}")
        learned = {name: to_float32(tensors[name].read()) for name in LEARNED if name in tensors}
        for name, array in learned.items():
            if array.ndim != 3 or not np.isfinite(array).all():
                raise ConfigError(f"{path}: {name} is {array.shape}; accepted: layers first of 3 axes, finite")
        weights = tuple(name for name in tensors if name not in (*stored, *learned))
        return cls(tensors, metadata["base"], metadata["scheme"], {setting: value} | learned, weights)

    @property
    def path(self) -> Path:
        """The file that it was read from."""
        return self.tensors.path

    @property
    def content_hash(self) -> str:
        """Of the file."""
        return self.tensors.files[0].content_hash()

    @property
    def identity(self) -> str:
        """The base's identity with these weights in place: the base's own where a setting is all that there is."""
        if not self.weights and len(self.parameters) == 1:
            return self.base
        return hashlib.sha256((self.base + self.content_hash).encode()).hexdigest()[:16]

    def apply(self, source: Checkpoint) -> Checkpoint:
        """Returns the checkpoint with these weights. Raises ConfigError when it is another checkpoint."""
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
        """Raises ConfigError where a weight store has other weights than these, or than the base's."""
        if identity != self.identity:
            self._require_base(identity)
            if not self.weights:
                return
            raise self._error(
                f"replaces {len(self.weights)} tensors, which the store {folder} holds quantized; give the "
                "original checkpoint, or a store made from it with `edgekv quantize --adapter`"
            )

    def require_scheme(self, scheme: str) -> None:
        """Raises ConfigError when the adapter was trained for another scheme."""
        if self.scheme != scheme:
            raise ConfigError(
                f"{self.path} was trained for another scheme",
                field="kv",
                value=scheme,
                accepted=[self.scheme],
                advice="or leave {adapter} out",
            )

    def require_shape(self, config: ModelConfig) -> None:
        """Raises ConfigError when what the scheme learned belongs to a model of another shape."""
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
        """Gives each layer's cache its own parameters: settings () or (1,) or (heads,), arrays."""
        for layer, cache in enumerate(caches):
            own = {name: np.atleast_1d(a[layer]) if a.ndim else a for name, a in self.parameters.items()}
            cache.load_adapter(own, f"adapter {self.path.name}")

    def _require_base(self, identity: str) -> None:
        if identity != self.base:
            raise self._error(
                f"belongs to the checkpoint with identity {self.base}, this one has {identity}; give the "
                "model that it was trained on"
            )

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"{self.path}: {what}")
