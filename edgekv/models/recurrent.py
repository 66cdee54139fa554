"""Llama whose layers are mostly recurrent: LFM2 (short convolutions) and Qwen3.5 (gated DeltaNet)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import Meta, field

from edgekv.checks import read_fields
from edgekv.errors import ConfigError, short_repr
from edgekv.models.architecture import Linear, Ops
from edgekv.models.config import (
    Epsilon,
    GatedDelta,
    Heads,
    Layers,
    ModelConfig,
    Raw,
    ShortConv,
    Taps,
    Width,
    alternating,
    recurrent_layers,
)
from edgekv.models.llama import NO_BIASES, Llama, LlamaConfigSchema, llama_rope
from edgekv.models.llava import Multimodal
from edgekv.models.rope import Factor, RopeSchema

DELTA_PARTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


class Lfm2ConfigSchema(LlamaConfigSchema):
    """The fields of lfm2; block_ff_dim and tie_embedding are older names."""

    tie_embedding: bool | None = None
    norm_eps: Epsilon = 1e-5
    conv_bias: bool = False
    conv_taps: Taps = field(default=3, name="conv_L_cache")
    block_ff_dim: Width | None = None
    block_multiple_of: Width = 256
    block_ffn_dim_multiplier: Factor = 1.0
    block_auto_adjust_ff_dim: bool = True
    full_attn_idxs: list[Annotated[int, Meta(ge=0, le=1024)]] | None = None

    def adjusted_size(self) -> int:
        """Returns the channels of an MLP."""
        size = self.block_ff_dim or self.intermediate_size
        if not self.block_auto_adjust_ff_dim:
            return size
        size = int(self.block_ffn_dim_multiplier * int(2 * size / 3))
        return -(-max(size, 1) // self.block_multiple_of) * self.block_multiple_of


class Lfm2(Llama):
    """LFM2 and LFM2.5: short convolutions in most layers, q/k norms in the others."""

    schema = Lfm2ConfigSchema
    defaults: ClassVar[Raw] = {
        "intermediate_size": 12288,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    }
    norms: ClassVar[Mapping[str, str]] = {"norm_in": "operator_norm", "norm_mlp": "ffn_norm"}
    qk_norms = ("q_layernorm", "k_layernorm")
    last_norm = "embedding_norm"
    out_part, mlp, up_parts, down_part = "out_proj", "feed_forward", ("w1", "w3"), "w2"

    fixed: ClassVar[Raw] = {**NO_BIASES, "activation": "silu", "qk_norm": True}

    @classmethod
    def model_config(cls, file: Lfm2ConfigSchema, raw: Raw, **overrides: Any) -> ModelConfig:
        layers = file.num_hidden_layers
        attend = set(range(layers) if file.full_attn_idxs is None else file.full_attn_idxs)
        types = file.layer_types or ["full_attention" if i in attend else "conv" for i in range(layers)]
        tied = file.tie_word_embeddings if file.tie_embedding is None else file.tie_embedding
        conv = ShortConv(file.hidden_size, file.conv_taps, file.conv_bias)
        overrides |= {"recurrences": recurrent_layers(types, "conv", conv, layers), "tied_embeddings": tied}
        overrides |= {"intermediate_size": file.adjusted_size(), "norm_eps": file.norm_eps}
        return super().model_config(file, raw, **overrides)

    def layer_linears(self, i: int) -> dict[str, Linear]:
        linears, hidden = super().layer_linears(i), self.config.hidden_size
        conv = self.config.layer_recurrences[i]
        if not isinstance(conv, ShortConv):
            return linears
        del linears[f"{i}.qkv"]
        base = f"{self.prefix}layers.{i}.conv."
        linears[f"{i}.out"] = self._linear(base, ("out_proj",), (hidden,), conv.mixed, conv.bias)
        return {f"{i}.in": self._linear(base, ("in_proj",), (conv.projected,), hidden, conv.bias), **linears}

    def layer_arrays(self, i: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        conv, base = self.config.layer_recurrences[i], f"{self.prefix}layers.{i}.conv.conv."
        if not isinstance(conv, ShortConv):
            return {}
        bias = {f"{i}.bias": (f"{base}bias", (conv.channels,))} if conv.bias else {}
        return {f"{i}.weight": (f"{base}weight", (conv.channels, 1, conv.taps)), **bias}


class Qwen35ConfigSchema(LlamaConfigSchema):
    """The fields of qwen3_5_text: sizes of its recurrent layers, and which layers attend."""

    full_attention_interval: Layers = 4
    linear_conv_kernel_dim: Taps = 4
    linear_key_head_dim: Annotated[int, Meta(ge=1, le=4096)] = 128
    linear_value_head_dim: Annotated[int, Meta(ge=1, le=4096)] = 128
    linear_num_key_heads: Heads = 16
    linear_num_value_heads: Heads = 32


class Qwen35(Llama):
    """Qwen 3.5: Gated DeltaNet in three layers of four, gated attention in the others; norms have 1 + w."""

    schema = Qwen35ConfigSchema
    defaults: ClassVar[Raw] = {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25,
    }
    fixed: ClassVar[Raw] = {"mlp_bias": False, "qk_norm": True, "gated_attention": True}
    norm_offset = 1.0
    ignored = (*Llama.ignored, r"^mtp\.")

    @classmethod
    def model_config(cls, file: Qwen35ConfigSchema, raw: Raw, **overrides: Any) -> ModelConfig:
        layers = file.num_hidden_layers
        types = file.layer_types or alternating(layers, file.full_attention_interval, "linear_attention")
        if (file.hidden_act or "silu") not in ("silu", "swish"):
            what = f"hidden_act {short_repr(file.hidden_act)} is not supported behind convolutions"
            raise ConfigError(f"config.json: {what}; supported: silu")
        heads = file.linear_num_key_heads, file.linear_num_value_heads
        dims = file.linear_key_head_dim, file.linear_value_head_dim
        delta = GatedDelta(*heads, *dims, file.linear_conv_kernel_dim, file.rms_norm_eps)
        if delta.value_heads % delta.key_heads:
            what = f"{delta.value_heads} linear_num_value_heads can't share {delta.key_heads} linear_num_key_heads"
            raise ConfigError(f"config.json: {what} evenly")
        share, head_dim = file.partial_rotary_factor, file.head_dim or 0
        for name in ("rope_parameters", "rope_scaling"):
            rope = read_fields(getattr(file, name) or {}, RopeSchema, f"config.json: {name}")
            share = rope.partial_rotary_factor or share
        overrides["layer_ropes"] = (llama_rope(file, int(head_dim * share)),) * layers
        recurrences = recurrent_layers(types, "linear_attention", delta, layers)
        return super().model_config(file, raw, recurrences=recurrences, **overrides)

    def layer_linears(self, i: int) -> dict[str, Linear]:
        c, base, delta = self.config, f"{self.prefix}layers.{i}.", self.config.layer_recurrences[i]
        linears = super().layer_linears(i)
        if isinstance(delta, GatedDelta):
            del linears[f"{i}.qkv"]
            base += "linear_attn."
            sizes = (delta.convolved, delta.mixed, delta.value_heads, delta.value_heads)
            linears[f"{i}.out"] = self._linear(base, ("out_proj",), (c.hidden_size,), delta.mixed, False)
            return {f"{i}.in": self._linear(base, DELTA_PARTS, sizes, c.hidden_size, False), **linears}
        heads = (2 * c.q_size, c.kv_size, c.kv_size)  # each query with its gate
        linears[f"{i}.qkv"] = self._linear(f"{base}self_attn.", self.qkv_parts, heads, c.hidden_size, c.qkv_bias)
        return linears

    def layer_arrays(self, i: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        delta, base = self.config.layer_recurrences[i], f"{self.prefix}layers.{i}.linear_attn."
        if not isinstance(delta, GatedDelta):
            return {}
        return {
            f"{i}.conv": (f"{base}conv1d.weight", (delta.convolved, 1, delta.taps)),
            f"{i}.log_decay": (f"{base}A_log", (delta.value_heads,)),
            f"{i}.time_bias": (f"{base}dt_bias", (delta.value_heads,)),
            f"{i}.norm": (f"{base}norm.weight", (delta.value_dim,)),
        }

    def pre_attention(self, ops: Ops, i: int, x: Any) -> Any:
        """Moves the gates to the end: in q_proj a head's gates follow its queries."""
        c, h = self.config, super().pre_attention(ops, i, x)
        if c.layer_recurrences[i] is not None:
            return h
        *heads, keys_values = ops.split(h, (c.head_dim,) * (2 * c.n_heads) + (2 * c.kv_size,))
        return ops.join((*heads[::2], keys_values, *heads[1::2]))

    def post_attention(self, ops: Ops, i: int, x: Any, attention: Any) -> Any:
        if self.config.layer_recurrences[i] is None:
            attention, gates = ops.split(attention, (self.config.q_size,) * 2)
            attention = ops.mul(attention, ops.activation(gates, "sigmoid"))
        return super().post_attention(ops, i, x, attention)


class Qwen35WithVision(Multimodal, Qwen35):
    """Qwen 3.5 with vision, read for its text, in which a token's three position ids are one."""

    text_types: ClassVar[Mapping[str, Raw]] = {"qwen3_5_text": {}}
    prefixes: tuple[str, ...] = ("model.language_model.",)
    ignored = (*Qwen35.ignored, r"^model\.visual\.")

    @classmethod
    def read_config(cls, raw: Raw) -> ModelConfig:
        tied, text = raw.get("tie_word_embeddings"), raw.get("text_config")
        if tied is not None and isinstance(text, dict):
            raw = {**raw, "text_config": {**text, "tie_word_embeddings": tied}}
        return super().read_config(raw)
