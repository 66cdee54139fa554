"""ModelConfig: every field that a decoder needs of a config.json, whatever the checkpoint's dialect.

A layer that does not attend has a recurrence, whose kernel is named ``kernel``: it turns its projection
(n, ``projected``) into the input of `post_attention` (n, ``mixed``), and changes the state's arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from msgspec import Meta

from edgekv.errors import ConfigError, short_repr
from edgekv.models.rope import RopeConfig

T = TypeVar("T")
Raw = Mapping[str, Any]
MAX_EXPERTS = 1 << 16  # of all layers: twice the largest models'
CONFIG_HINT = "add or correct it, or give a whole config"

# Types of fields. Their bounds are far beyond any known model; they keep a damaged or hostile file from taking
# memory or time before a tensor is looked at.
Layers = Annotated[int, Meta(ge=1, le=1024)]
Heads = Annotated[int, Meta(ge=1, le=1 << 14)]
Width = Annotated[int, Meta(ge=1, le=1 << 20)]
Vocabulary = Annotated[int, Meta(ge=1, le=1 << 24)]
Experts = Annotated[int, Meta(ge=1, le=1 << 14)]
Epsilon = Annotated[float, Meta(ge=0, le=1)]
Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
Taps = Annotated[int, Meta(ge=2, le=64)]
Shapes = dict[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class ShortConv:
    """LFM2's short convolution: y = c * conv(b * x), causal over ``taps`` tokens, each of ``channels`` by itself.

    bias: whether the convolution and the projections around it have one.
    """

    kernel: ClassVar[str] = "short_conv"

    channels: int
    taps: int
    bias: bool

    @property
    def projected(self) -> int:
        """Channels of b, c and x side by side."""
        return 3 * self.channels

    @property
    def mixed(self) -> int:
        """Channels of the result."""
        return self.channels

    def state(self) -> Shapes:
        """Returns the state's arrays: ``window``, the latest products b * x."""
        return {"window": (self.taps - 1, self.channels)}

    def constants(self) -> dict[str, float]:
        """Returns numbers that the kernel is given beside weights."""
        return {}


@dataclasses.dataclass(frozen=True)
class GatedDelta:
    """Gated DeltaNet (arXiv 2412.06464) as Qwen3.5 has it: each token decays and corrects a matrix of each head.

    A convolution of ``taps`` tokens and SiLU over queries, keys (``key_heads`` of ``key_dim`` channels each) and
    values (``value_heads`` of ``value_dim``) come before it, a gated RMS norm of each value head behind it.
    """

    kernel: ClassVar[str] = "gated_delta"

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    eps: float

    @property
    def convolved(self) -> int:
        """Channels of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.mixed

    @property
    def projected(self) -> int:
        """Channels of queries, keys, values and gates, and for each value head its beta and its decay."""
        return self.convolved + self.mixed + 2 * self.value_heads

    @property
    def mixed(self) -> int:
        """Channels of the result."""
        return self.value_heads * self.value_dim

    def state(self) -> Shapes:
        """Returns the state's arrays: ``window`` of the convolution, ``matrix`` of each value head."""
        matrix = (self.value_heads, self.key_dim, self.value_dim)
        return {"window": (self.taps - 1, self.convolved), "matrix": matrix}

    def constants(self) -> dict[str, float]:
        """Returns numbers that the kernel is given beside weights."""
        return {"eps": self.eps}


Recurrence = ShortConv | GatedDelta


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts: gated MLPs, of which each token goes through a few, whose results are weighted.

    ``layers[i]``: whether layer i has ``count`` experts of ``size`` channels, else it has an MLP as others.
    ``per_token`` of them are chosen, by the largest logits of the router. ``renormalized``: the weights are a
    softmax over the chosen ones; else over all. ``clamped``: (alpha, limit) of GPT-OSS's gate, in place of the
    activation.
    """

    layers: tuple[bool, ...]
    count: int
    per_token: int
    size: int
    renormalized: bool
    clamped: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of one decoder.

    ``layer_ropes[i]`` is layer i's rotation (None: queries and keys are not rotated); ``layer_windows[i]`` its
    sliding window in tokens (None: sees everything); ``layer_scales[i]`` multiplies the queries before the dot
    product (1/sqrt(head_dim) as a rule). ``embedding_scale`` multiplies the embeddings of tokens,
    ``residual_scale`` what a block adds to the residual stream, ``logit_scale`` the logits, which ``logit_cap``
    then bounds softly, as ``score_cap`` does attention's scores before the softmax. ``experts`` are in place of
    the MLPs of some layers (None: of none). ``attention_sinks``: a learned score of each head joins its softmax,
    without a value. ``recurrences[i]`` is what layer i has in place of attention (None: it attends); () where all
    attend. ``gated_attention``: whether queries come with as many gates, whose sigmoid attention's output is
    multiplied by.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    activation: str
    tied_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layer_ropes: tuple[RopeConfig | None, ...]
    layer_windows: tuple[int | None, ...]
    layer_scales: tuple[float, ...]
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    score_cap: float | None = None
    experts: ExpertsConfig | None = None
    attention_sinks: bool = False
    recurrences: tuple[Recurrence | None, ...] = ()
    gated_attention: bool = False

    def experts_of(self, i: int) -> ExpertsConfig | None:
        """Returns the experts of layer i, or None if it has an MLP."""
        return self.experts if self.experts and self.experts.layers[i] else None

    @property
    def ropes(self) -> list[RopeConfig]:
        """The rotations of the layers, each once."""
        every = self.layer_ropes
        return [rope for i, rope in enumerate(every) if rope is not None and rope not in every[:i]]

    def rope_invalidates_keys(self, before: int, after: int) -> bool:
        """Whether the keys of ``before`` tokens must be computed again when the sequence has ``after``."""
        return any(rope.rope_invalidates_keys(before, after) for rope in self.ropes)

    @property
    def layer_recurrences(self) -> tuple[Recurrence | None, ...]:
        """``recurrences``, an entry for each layer."""
        return self.recurrences or (None,) * self.n_layers

    @property
    def attending(self) -> list[int]:
        """The layers that attend."""
        return [i for i, recurrence in enumerate(self.layer_recurrences) if recurrence is None]

    @property
    def q_size(self) -> int:
        """Channels of all queries."""
        return self.n_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Channels of all keys, or of all values."""
        return self.n_kv_heads * self.head_dim


ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu"}
ACTIVATIONS |= dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh")


def activation(name: str) -> str:
    """Returns the operator's name for a Hugging Face activation. Raises ConfigError for an unknown one."""
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"config.json: activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def head_size(hidden: int, heads: int) -> int:
    """Returns the channels of a head by default. Raises ConfigError if there are more heads than channels."""
    if heads > hidden:
        raise ConfigError(f"config.json: {heads} heads leave no head_dim of a width of {hidden}; {CONFIG_HINT}")
    return hidden // heads


def alternating(n_layers: int, every: int, other: str = "sliding_attention") -> list[str]:
    """Returns layer_types in which every ``every``-th layer sees everything."""
    return [other if (i + 1) % every else "full_attention" for i in range(n_layers)]


def sliding_layers(layer_types: Sequence[str], window: int | None, n_layers: int) -> tuple[int | None, ...]:
    """Returns each layer's window, of config.json's layer_types. Raises ConfigError for another number or type."""
    return _by_type(layer_types, "sliding_attention", window, n_layers)


def recurrent_layers(
    layer_types: Sequence[str], kind: str, recurrence: Recurrence, n_layers: int
) -> tuple[Recurrence | None, ...]:
    """Returns `ModelConfig.recurrences` of config.json's layer_types: that recurrence in layers of type ``kind``.

    Raises ConfigError for another number or type of layers, and where none attends.
    """
    found = _by_type(layer_types, kind, recurrence, n_layers)
    if None not in found:
        raise ConfigError("config.json: no layer attends; at least one must be of the type full_attention")
    return found


def _by_type(layer_types: Sequence[str], kind: str, value: T, n_layers: int) -> tuple[T | None, ...]:
    """Returns the value for each layer of type ``kind``, and None for those of type full_attention."""
    if len(layer_types) != n_layers:
        raise ConfigError(f"config.json: layer_types has {len(layer_types)} entries for {n_layers} layers")
    unknown = sorted(set(layer_types) - {"full_attention", kind})
    if unknown:
        what = f"layer_types has {short_repr(unknown[0])}, which is not supported"
        raise ConfigError(f"config.json: {what}; supported: full_attention, {kind}")
    return tuple(value if layer == kind else None for layer in layer_types)


def check(config: ModelConfig) -> ModelConfig:
    """Returns the config itself. Raises ConfigError where its sizes contradict each other."""
    heads, kv_heads, experts = config.n_heads, config.n_kv_heads, config.experts
    wrong = ""
    if heads % kv_heads:
        wrong = f"{heads} query heads can't share {kv_heads} key-value heads evenly"
    elif experts and experts.per_token > experts.count:
        wrong = f"{experts.per_token} experts per token are more than there are, {experts.count}"
    elif experts and experts.count * config.n_layers > MAX_EXPERTS:
        wrong = f"{experts.count} experts in each of {config.n_layers} layers: at most {MAX_EXPERTS} in all"
    if wrong:
        raise ConfigError(f"config.json: {wrong}")
    return config
