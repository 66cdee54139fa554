"""An adapter: what training for one KV scheme changes in one checkpoint, in a small .safetensors file.

tau                      F32 (), (n_layers,) or (n_layers, n_heads): the scheme's softmax temperature
any checkpoint tensor    under its own name: its replacement (V_proj; the whole c_attn of a GPT-2)
`__metadata__`           format, version, base (the checkpoint's identity), scheme; the rest is provenance
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgekv.checkpoint.source import Source
from edgekv.checkpoint.tensors import DTYPES, FLOATS, TensorFile, to_float32
from edgekv.errors import ConfigError

FORMAT, VERSION = "edgekv-adapter", "1"
TAU = "tau"

F32 = npt.NDArray[np.float32]


class Adaptable(Protocol):
    """A layer's KV cache."""

    def adapt(self, parameters: Mapping[str, F32], source: str) -> None: ...


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An opened adapter; its weights are mapped and not read.

    base: identity of the checkpoint that it belongs to; scheme: name of the KV scheme that it was trained for;
    tau: as stored; weights: names of the checkpoint's tensors that it replaces.
    """

    file: TensorFile
    base: str
    scheme: str
    tau: F32
    weights: tuple[str, ...]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Adapter:
        """Raises CheckpointError for what is no safetensors file, ConfigError for what is no adapter."""
        file = TensorFile(Path(path).expanduser())
        found = file.metadata.get("format"), file.metadata.get("version")
        if found != (FORMAT, VERSION):
            raise ConfigError(
                f"{path}: is no adapter that this edgekv reads (format {found[0]}, version {found[1]}); accepted: "
                f"{FORMAT}, version {VERSION}"
            )
        for name in ("base", "scheme"):
            if name not in file.metadata:
                raise ConfigError(f"{path}: its __metadata__ does not say {name!r}; write the adapter again")
        names = file.names()
        for name in names:
            if DTYPES.get(file.info(name).dtype) not in FLOATS:
                raise ConfigError(
                    f"{path}: tensor {name!r} is {file.info(name).dtype}; accepted are F64, F32, F16, BF16"
                )
        if TAU not in names:
            raise ConfigError(f"{path}: has no tensor 'tau'; write the adapter again")
        tau = to_float32(file.array(TAU))
        if not (np.isfinite(tau) & (tau > 0)).all():
            raise ConfigError(f"{path}: tau must be positive everywhere, its least value is {tau.min()}")
        weights = tuple(name for name in names if name != TAU)
        return cls(file, file.metadata["base"], file.metadata["scheme"], tau, weights)

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def identity(self) -> str:
        """The base's identity with these weights in place: the base's own where there are none."""
        if not self.weights:
            return self.base
        return hashlib.sha256(self.base.encode() + self.file.fingerprint()).hexdigest()[:16]

    def apply(self, source: Source) -> Source:
        """The checkpoint with the adapter's weights in place. Raises ConfigError when it is another checkpoint."""
        self._require_base(source.identity)
        for name in self.weights:
            if name not in source.tensors:
                raise ConfigError(
                    f"{self.path}: tensor {name!r} is not in {source.path}; accepted: tau and the names there"
                )
            shape, expected = self.file.info(name).shape, source.tensors.info(name).shape
            if shape != expected:
                raise ConfigError(
                    f"{self.path}: tensor {name!r} has shape {shape}, in {source.path} it has {expected}; "
                    "train the adapter on that checkpoint"
                )
        tensors = source.tensors.replaced(self.file, self.weights)
        return dataclasses.replace(source, tensors=tensors, identity=self.identity)

    def require_store(self, identity: str, folder: Path) -> None:
        """Checks that a weight store needs no change: it has these weights already, or there are none.

        Raises ConfigError otherwise.
        """
        if identity == self.identity:
            return
        self._require_base(identity)
        raise ConfigError(
            f"{self.path}: replaces {len(self.weights)} tensors, which the store {folder} holds quantised; give "
            "the original checkpoint, or a store made from it with `edgekv quantize --adapter`"
        )

    def require_scheme(self, scheme: str) -> None:
        """Raises ConfigError when the adapter was trained for another scheme."""
        if scheme != self.scheme:
            raise ConfigError(
                f"{self.path}: was trained for --kv {self.scheme}, not {scheme}; use that, or leave --adapter out"
            )

    def require_shape(self, n_layers: int, n_heads: int) -> None:
        """Raises ConfigError when tau belongs to a model of another shape."""
        accepted = (), (n_layers,), (n_layers, n_heads)
        if self.tau.shape not in accepted:
            raise ConfigError(
                f"{self.path}: tau has shape {self.tau.shape}; accepted: {', '.join(map(str, accepted))}"
            )

    def adapt(self, caches: Sequence[Adaptable]) -> None:
        """Gives each layer's cache its tau: () if all layers share it, else the layer's own (1,) or (n_heads,)."""
        for layer, cache in enumerate(caches):
            tau = self.tau if self.tau.ndim == 0 else self.tau[layer].reshape(-1)
            cache.adapt({TAU: tau}, f"adapter {self.path.name}")

    def _require_base(self, identity: str) -> None:
        if identity != self.base:
            raise ConfigError(
                f"{self.path}: belongs to the checkpoint with identity {self.base}, this one has {identity}; give "
                "the model that it was trained on"
            )
