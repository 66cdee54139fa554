"""The base of all architectures: named weights, and the blocks of a decoder, written against abstract operators.

A block is written once. NumPy's operators are the reference; those of the CPU and of CUDA are kernels.
"""

from __future__ import annotations

import abc
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from msgspec import Struct

from edgekv.checks import read_fields
from edgekv.models.config import CONFIG_HINT, ModelConfig, Raw
from edgekv.models.gguf import GgufNames

T = TypeVar("T")


class Ops(Protocol):
    """Operators on (n_tokens, channels) activations; weights are named as in `Architecture`.

    linear: x (n, columns) through a linear layer: (n, rows). add_linear: x plus the linear layer of y; may be x
    itself, changed. rms_norm: x / sqrt(mean(x^2) + eps) times the vector ``name``. layer_norm: (x - mean) /
    sqrt(variance + eps) times ``name.weight`` plus ``name.bias``. activation: silu, gelu, gelu_tanh, relu or
    sigmoid. gated_linear: a linear layer, the activation of the first half of its channels times the second.
    split: x cut along the channels, into parts of these sizes. join: the parts side by side. soft_cap: cap *
    tanh(x / cap). add_experts: x plus what layer i's router and experts make of y, the last operator of a block.
    """

    def linear(self, x: Any, name: str) -> Any: ...
    def add_linear(self, x: Any, y: Any, name: str) -> Any: ...
    def rms_norm(self, x: Any, name: str, eps: float) -> Any: ...
    def layer_norm(self, x: Any, name: str, eps: float) -> Any: ...
    def activation(self, x: Any, kind: str) -> Any: ...
    def gated_linear(self, x: Any, name: str, kind: str) -> Any: ...
    def split(self, x: Any, sizes: Sequence[int]) -> Sequence[Any]: ...
    def join(self, parts: Sequence[Any]) -> Any: ...
    def add(self, a: Any, b: Any) -> Any: ...
    def mul(self, a: Any, b: Any) -> Any: ...
    def scale(self, x: Any, factor: float) -> Any: ...
    def soft_cap(self, x: Any, cap: float) -> Any: ...
    def add_experts(self, x: Any, y: Any, i: int) -> Any: ...


@dataclasses.dataclass(frozen=True)
class WeightPart:
    """One tensor of the checkpoint: ``rows`` outputs x ``columns`` inputs, transposed where it is a Conv1D's."""

    tensor: str
    rows: int
    columns: int
    conv1d: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """The shape in the checkpoint."""
        return (self.columns, self.rows) if self.conv1d else (self.rows, self.columns)


@dataclasses.dataclass(frozen=True)
class Linear:
    """A fused projection: the parts stacked along the outputs, with the biases stacked likewise.

    n_experts: experts whose rows follow one another, as many of each; 0: it belongs to none.
    """

    parts: tuple[WeightPart, ...]
    biases: tuple[str, ...] = ()
    n_experts: int = 0

    @classmethod
    def of_experts(cls, linears: Sequence[Linear]) -> Linear:
        """Joins the projections of all experts, which have the same shape."""
        parts = tuple(part for linear in linears for part in linear.parts)
        return cls(parts, tuple(bias for linear in linears for bias in linear.biases), len(linears))

    @property
    def rows(self) -> int:
        """Outputs."""
        return sum(part.rows for part in self.parts)

    @property
    def columns(self) -> int:
        """Inputs."""
        return self.parts[0].columns

    @property
    def n_elements(self) -> int:
        """Weights, biases apart."""
        return self.rows * self.columns

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Returns the checkpoint tensors of the parts: name -> shape."""
        shapes: dict[str, tuple[int, ...]] = {part.tensor: part.shape for part in self.parts}
        return shapes | {bias: (part.rows,) for part, bias in zip(self.parts, self.biases, strict=False)}


class Architecture(abc.ABC):
    """Weights and blocks of one model family.

    Names: linears ``{i}.qkv``, ``{i}.out``, ``{i}.up``, ``{i}.down``, ``head``, with experts ``{i}.router``,
    ``{i}.experts_up`` and ``{i}.experts_down``; vectors ``{i}.norm_in`` and so on; tables ``embed`` and, with
    learned positions, ``positions``. A layer that does not attend has ``{i}.in`` in place of ``{i}.qkv``.
    """

    schema: type[Struct]  # of config.json
    defaults: ClassVar[Raw] = {}  # of the family, for fields that config.json does not have or that are null
    gguf: ClassVar[GgufNames | None] = None  # of the family itself; a subclass has its own, or none
    layers_key, positions_key = "num_hidden_layers", "max_position_embeddings"  # of config.json
    stacked_experts = False  # whether the checkpoint holds those of a layer in one tensor
    prefixes: tuple[str, ...]  # of the checkpoint's tensor names, the usual one first
    ignored: tuple[str, ...]  # patterns of checkpoint tensors that hold no weights
    head_tensor = "lm_head.weight"  # of the language-model head, where it has one of its own
    required_tensor: str  # a tensor that every checkpoint of the family has, without its prefix
    norm_offset = 0.0  # is added to norm weights as the checkpoint has them

    def __init__(self, config: ModelConfig, prefix: str) -> None:
        self.config, self.prefix = config, prefix

    @classmethod
    def read_config(cls, raw: Raw) -> ModelConfig:
        """Reads a config.json. Raises ConfigError for what the schema refuses and for contradictions."""
        whole = {**cls.defaults, **{name: value for name, value in raw.items() if value is not None}}
        return cls.model_config(read_fields(whole, cls.schema, "config.json", CONFIG_HINT), raw)

    @classmethod
    @abc.abstractmethod
    def model_config(cls, file: Any, raw: Raw) -> ModelConfig:
        """Makes the ModelConfig. file: config.json's fields, as ``schema`` has them; raw: the whole of it."""

    @abc.abstractmethod
    def tables(self) -> dict[str, tuple[str, tuple[int, int]]]:
        """Returns the row tables that are looked up by id: name -> (tensor, shape)."""

    @abc.abstractmethod
    def layer_linears(self, i: int) -> dict[str, Linear]:
        """Returns the projections of layer i by name."""

    @abc.abstractmethod
    def layer_vectors(self, i: int) -> dict[str, tuple[str, int]]:
        """Returns layer i's norm weights and the like: name -> (tensor, size)."""

    def layer_arrays(self, i: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns the kernel arguments of a layer that does not attend: ``{i}.argument`` -> (tensor, shape)."""
        return {}

    @abc.abstractmethod
    def final_vectors(self) -> dict[str, tuple[str, int]]:
        """Returns the norm weights behind the last layer: name -> (tensor, size)."""

    @abc.abstractmethod
    def pre_attention(self, ops: Ops, i: int, x: Any) -> Any:
        """Returns queries, keys and values of x (n, hidden) side by side, with gates behind them, if any.

        Of a layer that does not attend: the input of its recurrence. `widths` has the channels.
        """

    @abc.abstractmethod
    def post_attention(self, ops: Ops, i: int, x: Any, attention: Any) -> Any:
        """Returns the next layer's x (n, hidden) from x and attention (n, n_heads * head_dim) with its gates."""

    @abc.abstractmethod
    def final_norm(self, ops: Ops, x: Any) -> Any:
        """Returns the language-model head's input (n, hidden) from x (n, hidden) of the last layer."""

    def head(self, ops: Ops, x: Any) -> Any:
        """Returns the logits (n, vocab) from x (n, hidden) of the last layer."""
        return ops.linear(self.final_norm(ops, x), "head")

    def widths(self, i: int) -> tuple[int, int]:
        """Returns the channels of layer i's `pre_attention`, and of the attention that `post_attention` gets."""
        c, recurrence = self.config, self.config.layer_recurrences[i]
        if recurrence is not None:
            return recurrence.projected, recurrence.mixed
        gates = c.q_size if c.gated_attention else 0
        return c.q_size + 2 * c.kv_size + gates, c.q_size + gates

    @property
    def learned_positions(self) -> bool:
        """Whether positions are rows of a table, which are added to the embeddings."""
        return "positions" in self.tables()

    @property
    def active_experts(self) -> int:
        """Experts of a layer that a token goes through; 0: there are none."""
        return self.config.experts.per_token if self.config.experts else 0

    def linears(self) -> dict[str, Linear]:
        """Returns every projection of the model, the language-model head last."""
        tensor = self.tables()["embed"][0] if self.config.tied_embeddings else self.head_tensor
        head = Linear((WeightPart(tensor, self.config.vocab_size, self.config.hidden_size),))
        return {**self._of_layers(self.layer_linears), "head": head}

    def vectors(self) -> dict[str, tuple[str, int]]:
        """Returns norm weights of all layers and the last: name -> (tensor, size)."""
        return {**self._of_layers(self.layer_vectors), **self.final_vectors()}

    def arrays(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns `layer_arrays` of all layers."""
        return self._of_layers(self.layer_arrays)

    def _of_layers(self, layer: Callable[[int], dict[str, T]]) -> dict[str, T]:
        return {name: spec for i in range(self.config.n_layers) for name, spec in layer(i).items()}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Returns every checkpoint tensor that the model reads, in the order of the layers: name -> shape."""
        shapes: dict[str, tuple[int, ...]] = dict(self.tables().values())
        for i in range(self.config.n_layers):
            shapes |= {tensor: (size,) for tensor, size in self.layer_vectors(i).values()}
            shapes |= dict(self.layer_arrays(i).values())
            for linear in self.layer_linears(i).values():
                shapes |= linear.tensors()
        shapes |= {tensor: (size,) for tensor, size in self.final_vectors().values()}
        return shapes | self.linears()["head"].tensors()

    def ignores(self, tensor: str) -> bool:
        """Whether a tensor of the checkpoint holds no weights."""
        return any(re.search(pattern, tensor) for pattern in self.ignored)
