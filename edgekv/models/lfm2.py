"""LFM2 and LFM2.5: short convolutions in place of attention in most layers, q/k norms in the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import Meta, field

from edgekv.models.architecture import Linear
from edgekv.models.config import Epsilon, ModelConfig, Raw, ShortConv, Taps, Width, recurrent_layers
from edgekv.models.llama import Llama, LlamaConfigSchema, llama_config
from edgekv.models.rope import Factor


class Lfm2ConfigSchema(LlamaConfigSchema):
    """block_ff_dim and tie_embedding are older names."""

    tie_embedding: bool | None = None
    norm_eps: Epsilon = 1e-5
    conv_bias: bool = False
    conv_taps: Taps = field(default=3, name="conv_L_cache")
    block_ff_dim: Width | None = None
    block_multiple_of: Width = 256
    block_ffn_dim_multiplier: Factor = 1.0
    block_auto_adjust_ff_dim: bool = True
    full_attn_idxs: list[Annotated[int, Meta(ge=0, le=1024)]] | None = None


def _intermediate_size(file: Lfm2ConfigSchema) -> int:
    size = file.block_ff_dim or file.intermediate_size
    if not file.block_auto_adjust_ff_dim:
        return size
    size = int(file.block_ffn_dim_multiplier * int(2 * size / 3))
    return -(-max(size, 1) // file.block_multiple_of) * file.block_multiple_of


class Lfm2(Llama):
    """Llama by other names; which layers are convolutions is data of its config."""

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

    @classmethod
    def model_config(cls, file: Lfm2ConfigSchema, raw: Raw) -> ModelConfig:
        layers = file.num_hidden_layers
        attend = set(range(layers) if file.full_attn_idxs is None else file.full_attn_idxs)
        types = file.layer_types or ["full_attention" if i in attend else "conv" for i in range(layers)]
        conv = ShortConv(file.hidden_size, file.conv_taps, file.conv_bias)
        return llama_config(
            "lfm2",
            file,
            intermediate_size=_intermediate_size(file),
            norm_eps=file.norm_eps,
            activation="silu",
            tied_embeddings=file.tie_word_embeddings if file.tie_embedding is None else file.tie_embedding,
            qkv_bias=False,
            out_bias=False,
            mlp_bias=False,
            qk_norm=True,
            recurrences=recurrent_layers(types, "conv", conv, layers),
        )

    def layer_linears(self, i: int) -> dict[str, Linear]:
        c, base, conv = self.config, f"{self.prefix}layers.{i}.", self.config.layer_recurrences[i]
        hidden, inner, feed = c.hidden_size, c.intermediate_size, f"{base}feed_forward."
        if isinstance(conv, ShortConv):
            first = {f"{i}.in": self._linear(f"{base}conv.", ("in_proj",), (conv.projected,), hidden, conv.bias)}
            out = self._linear(f"{base}conv.", ("out_proj",), (hidden,), conv.mixed, conv.bias)
        else:
            attn, sizes = f"{base}self_attn.", (c.q_size, c.kv_size, c.kv_size)
            first = {f"{i}.qkv": self._linear(attn, self.qkv_parts, sizes, hidden, c.qkv_bias)}
            out = self._linear(attn, ("out_proj",), (hidden,), c.q_size, c.out_bias)
        return {
            **first,
            f"{i}.out": out,
            f"{i}.up": self._linear(feed, ("w1", "w3"), (inner, inner), hidden, c.mlp_bias),
            f"{i}.down": self._linear(feed, ("w2",), (hidden,), inner, c.mlp_bias),
        }

    def layer_arrays(self, i: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        conv, base = self.config.layer_recurrences[i], f"{self.prefix}layers.{i}.conv.conv."
        if not isinstance(conv, ShortConv):
            return {}
        arrays: dict[str, tuple[str, tuple[int, ...]]] = {
            f"{i}.weight": (f"{base}weight", (conv.channels, 1, conv.taps))
        }
        return arrays | ({f"{i}.bias": (f"{base}bias", (conv.channels,))} if conv.bias else {})
