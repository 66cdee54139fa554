"""A model ready to run: where its weights are, what they will take, and the opened decoder."""

from __future__ import annotations

import abc
import dataclasses
import os
import pathlib
from collections.abc import Callable
from typing import Any

from edgekv import kernels
from edgekv.checkpoint.adapter import Adapter
from edgekv.checkpoint.source import holds_tokenizer, open_source
from edgekv.errors import ConfigError
from edgekv.kernels import Kernels
from edgekv.kvcache import CacheSpec
from edgekv.linear.formats import WeightFormat, specs_bytes, store_specs, weight_format
from edgekv.linear.onnx import OrtDense
from edgekv.linear.reference import NumpyDense
from edgekv.linear.store import Progress, Store, is_store, open_or_build
from edgekv.linear.weights import CheckpointWeights, Weights
from edgekv.machine import available_memory_bytes
from edgekv.models import architecture
from edgekv.models.architecture import Architecture
from edgekv.models.config import ModelConfig
from edgekv.models.decoder import Decoder, Dense

Path = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class Model:
    """An opened checkpoint or weight store; nothing large has been read yet."""

    path: pathlib.Path
    raw_config: dict[str, Any]
    identity: str
    tokenizer_path: pathlib.Path | None
    weights: CheckpointWeights | Store
    adapter: Adapter | None = None

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        config: Path | None = None,
        tokenizer: Path | None = None,
        adapter: Path | None = None,
    ) -> Model:
        """Opens a Hugging Face folder, a .safetensors or .gguf file or a store, and checks every tensor's shape.

        adapter: an adapter.safetensors whose weights take the place of the checkpoint's. Raises CheckpointError or
        ConfigError.
        """
        place = pathlib.Path(path).expanduser()
        given = pathlib.Path(tokenizer).expanduser() if tokenizer else None
        change = None if adapter is None else Adapter.open(adapter)
        if is_store(place):
            store = Store(place)
            if change:
                change.require_store(store.identity, place)
            beside = place if holds_tokenizer(place) else None
            model = cls(place, store.config, store.identity, given or beside, store, change)
        else:
            source = open_source(place, config=config, tokenizer=tokenizer)
            if change:
                source = change.apply(source)
            weights = CheckpointWeights(source, architecture(source.config, source.tensors))
            folder = given or source.tokenizer_folder
            model = cls(place, source.config, source.identity, folder, weights, change)
        if change:
            change.require_shape(model.config)
        return model

    @property
    def arch(self) -> Architecture:
        return self.weights.arch

    @property
    def config(self) -> ModelConfig:
        return self.arch.config

    @property
    def text_config(self) -> dict[str, Any]:
        """config.json with what a multimodal model says of its decoder at the top level."""
        return {**self.raw_config.get("text_config", {}), **self.raw_config}

    @property
    def image_token(self) -> int | None:
        """The token in a prompt that stands for an image; None: the model takes none."""
        token = self.raw_config.get("image_token_index", self.raw_config.get("image_token_id"))
        return None if token is None else int(token)

    @property
    def placeholder(self) -> int:
        """The token that counts for a position that holds an embedding."""
        token = self.image_token
        return token if token is not None and token < self.config.vocab_size else 0

    @property
    def is_store(self) -> bool:
        return isinstance(self.weights, Store)

    @property
    def n_parameters(self) -> int:
        """Weights of the model; a tied embedding counts once."""
        tables = sum(rows * columns for _, (rows, columns) in self.arch.tables().values())
        linears = self.arch.linears()
        if self.config.tied_embeddings:
            linears.pop("head")
        biases = sum(linear.rows for linear in linears.values() if linear.biases)
        vectors = sum(size for _, size in self.arch.vectors().values())
        return tables + sum(linear.n_elements for linear in linears.values()) + biases + vectors

    def summary(self) -> dict[str, Any]:
        """What a report says of it: name, size, shapes."""
        names = ("n_layers", "hidden_size", "n_heads", "n_kv_heads", "head_dim", "vocab_size", "max_positions")
        return {
            "name": self.path.name,
            "model_type": self.config.model_type,
            "n_parameters": self.n_parameters,
            "identity": self.identity,
            **{name: getattr(self.config, name) for name in names},
        }

    def weight_format(self, name: str) -> WeightFormat:
        """The format that ``--weights name`` means for this model; a store has its own."""
        if isinstance(self.weights, CheckpointWeights):
            return weight_format(name, self.arch, self.weights.own_format)
        if name not in ("auto", self.weights.form.name):
            raise ConfigError(
                f"--weights {name}: {self.path} is a store of {self.weights.form.name} weights; "
                f"leave --weights out, or give the original checkpoint"
            )
        return self.weights.form

    def weights_note(self, form: WeightFormat) -> str | None:
        """What a user must know of these weights in this format."""
        lost = self.weights.quantised_again(form) if isinstance(self.weights, CheckpointWeights) else ()
        if not lost:
            return None
        formats = sorted({form.of(name).name for name in self.arch.linears()})
        hint = "" if formats == ["int8-32"] else "; --weights int8-32 loses least"
        return f"weights of type {', '.join(lost)} were quantised a second time, to {' and '.join(formats)}{hint}"

    def weights_bytes(self, form: WeightFormat) -> int:
        """Bytes of a store in this format: what decoding maps."""
        return specs_bytes(store_specs(self.arch, form, self.weights.table_dtypes))

    def store(self, form: WeightFormat, progress: Progress | None = None) -> Store:
        """The weights as a store; a checkpoint's is made at the first call and kept in the cache folder."""
        if isinstance(self.weights, Store):
            return self.weights
        return open_or_build(self.weights, form, progress)


class Device(abc.ABC):
    """A place to compute, as `--device` names it."""

    def available(self, spec: CacheSpec) -> bool:
        """Whether this machine has it, and it has the scheme."""
        return True

    def require(self, spec: CacheSpec) -> None:
        """An EdgeKVError says what is missing for the scheme."""
        return

    def free_bytes(self) -> int:
        """Memory for weights and caches."""
        return available_memory_bytes()

    @abc.abstractmethod
    def decoder(
        self, model: Model, form: WeightFormat, capacity: int, threads: int, progress: Progress | None
    ) -> Decoder:
        """Loads the weights in this format."""


@dataclasses.dataclass(frozen=True)
class Host(Device):
    """This machine's cores: the linear layers' backend, and the attention kernels."""

    open_dense: Callable[[Model, WeightFormat, int, Progress | None], tuple[Weights, Dense]]
    open_kernels: Callable[[int], Kernels]

    def decoder(
        self, model: Model, form: WeightFormat, capacity: int, threads: int, progress: Progress | None
    ) -> Decoder:
        weights, dense = self.open_dense(model, form, threads, progress)
        return Decoder(weights, dense, self.open_kernels(threads), capacity, threads)


def _onnxruntime(
    model: Model, form: WeightFormat, threads: int, progress: Progress | None
) -> tuple[Weights, Dense]:
    store = model.store(form, progress)
    return store, OrtDense(store, threads)


def _numpy(model: Model, form: WeightFormat, threads: int, progress: Progress | None) -> tuple[Weights, Dense]:
    weights = model.weights if form.bits == 32 else model.store(form, progress)
    return weights, NumpyDense(weights)


def _cuda() -> Device:
    from edgekv.session.cuda_device import CudaDevice

    return CudaDevice()


DEVICES: dict[str, Callable[[], Device]] = {
    "cpu": lambda: Host(_onnxruntime, kernels.numba_kernels),  # onnxruntime and Numba
    "numpy": lambda: Host(_numpy, kernels.numpy_kernels),  # the reference: slow, exact
    "cuda": _cuda,  # CuPy
}


def find_device(name: str) -> Device:
    if name not in DEVICES:
        raise ConfigError(f"--device {name!r} is unknown; accepted: auto, {', '.join(DEVICES)}")
    return DEVICES[name]()


def resolve_device(name: str, spec: CacheSpec) -> str:
    """What ``auto`` means on this machine for this scheme: cuda where it can be had; other names stay."""
    if name != "auto":
        return name
    return "cuda" if find_device("cuda").available(spec) else "cpu"
