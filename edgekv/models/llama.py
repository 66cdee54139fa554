"""Llama 1 to 3.2, TinyLlama and SmolLM, and the base of most other families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from msgspec import Struct

from edgekv.checks import read_fields
from edgekv.models.architecture import Architecture, Linear, Ops, WeightPart
from edgekv.models.config import (
    Epsilon,
    Heads,
    Layers,
    ModelConfig,
    Raw,
    Vocabulary,
    Width,
    activation,
    check,
    head_size,
)
from edgekv.models.gguf import ROTATED, GgufNames
from edgekv.models.rope import Positions, RopeConfig, RopeSchema, Share, Theta

NO_BIASES = {"qkv_bias": False, "out_bias": False, "mlp_bias": False}


class LlamaConfigSchema(Struct):
    """The fields of config.json of a decoder built as Llama's; a family's schema adds its own.

    None stands for a default that depends on other fields.
    """

    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Heads
    vocab_size: Vocabulary
    num_key_value_heads: Heads | None = None
    head_dim: Width | None = None
    max_position_embeddings: Positions = 2048
    original_max_position_embeddings: Positions | None = None
    rms_norm_eps: Epsilon = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: Theta = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: Share = 1.0
    sliding_window: Positions | None = None
    use_sliding_window: bool | None = None
    layer_types: list[str] | None = None

    def windows(self) -> tuple[int | None, ...]:
        """Returns each layer's sliding window; None: the layer sees everything."""
        return (None,) * self.num_hidden_layers


def llama_config(model_type: str, file: LlamaConfigSchema, **overrides: Any) -> ModelConfig:
    """Makes the ModelConfig of a decoder built as Llama's. overrides: the fields in which a family differs."""
    layers, heads = file.num_hidden_layers, file.num_attention_heads
    head_dim = file.head_dim or head_size(file.hidden_size, heads)
    ropes = overrides.get("layer_ropes") or (llama_rope(file, head_dim),) * layers
    reach = [rope.max_positions for rope in ropes if rope is not None]
    fields = {
        "model_type": model_type,
        "vocab_size": file.vocab_size,
        "hidden_size": file.hidden_size,
        "intermediate_size": file.intermediate_size,
        "n_layers": layers,
        "n_heads": heads,
        "n_kv_heads": file.num_key_value_heads or heads,
        "head_dim": head_dim,
        "max_positions": max(reach, default=file.max_position_embeddings),
        "norm_eps": file.rms_norm_eps,
        "activation": activation(file.hidden_act or "silu"),
        "tied_embeddings": file.tie_word_embeddings,
        "qkv_bias": file.attention_bias,
        "out_bias": file.attention_bias,
        "mlp_bias": file.mlp_bias,
        "qk_norm": False,
        "layer_ropes": ropes,
        "layer_windows": overrides.get("layer_windows") or file.windows(),
        "layer_scales": (head_dim**-0.5,) * layers,
    }
    return check(ModelConfig(**{**fields, **overrides}))


class SlidingConfigSchema(LlamaConfigSchema):
    """The fields of a decoder whose window, if there is one, is that of all layers."""

    def windows(self) -> tuple[int | None, ...]:
        return (self.sliding_window,) * self.num_hidden_layers


def llama_rope(file: LlamaConfigSchema, dim: int) -> RopeConfig:
    """Makes a rotation of ``rope_scaling`` + ``rope_theta`` (transformers 4) or ``rope_parameters`` (5).

    dim: rotated channels of a head. As in transformers, an added rope_scaling replaces rope_parameters, but not
    their theta. Raises ConfigError as `read_fields`.
    """
    name = "rope_scaling" if file.rope_scaling or not file.rope_parameters else "rope_parameters"
    older = read_fields(file.rope_parameters or {}, RopeSchema, "config.json: rope_parameters")
    theta, original = older.rope_theta or file.rope_theta, file.original_max_position_embeddings
    return RopeConfig.of(getattr(file, name) or {}, name, dim, file.max_position_embeddings, theta, original)


class Llama(Architecture):
    """Llama: RMS norms before attention and MLP, rotated queries and keys, a gated MLP."""

    prefixes: tuple[str, ...] = ("model.", "")
    ignored: tuple[str, ...] = (r"rotary_emb\.inv_freq$", r"^lm_head\.weight$")
    schema = LlamaConfigSchema
    fixed: ClassVar[Raw] = {}  # fields of ModelConfig that do not depend on config.json
    gguf = GgufNames("llama", "llama", interleaved=ROTATED)
    required_tensor = "embed_tokens.weight"
    norms: ClassVar[Mapping[str, str]] = {"norm_in": "input_layernorm", "norm_mlp": "post_attention_layernorm"}
    """A layer's norms: before attention (norm_in) and behind it (norm_attention), before the MLP (norm_mlp) and
    behind it (norm_down), as the checkpoint calls them; there is none where a name is missing."""
    qk_norms, last_norm = ("q_norm", "k_norm"), "norm"
    qkv_parts: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # of self_attn; one where they are fused
    out_part, mlp, down_part = "o_proj", "mlp", "down_proj"
    up_parts: tuple[str, ...] = ("gate_proj", "up_proj")  # of ``mlp``, as is down_part

    @classmethod
    def model_config(cls, file: Any, raw: Raw, **overrides: Any) -> ModelConfig:
        """Makes the ModelConfig; overrides: fields in which a family differs, beside those of ``fixed``."""
        return llama_config(raw["model_type"], file, **{**cls.fixed, **overrides})

    def tables(self) -> dict[str, tuple[str, tuple[int, int]]]:
        c = self.config
        return {"embed": (f"{self.prefix}embed_tokens.weight", (c.vocab_size, c.hidden_size))}

    def _linear(
        self, base: str, names: tuple[str, ...], rows: tuple[int, ...], columns: int, bias: bool
    ) -> Linear:
        rows = rows if len(names) == len(rows) else (sum(rows),)
        parts = tuple(WeightPart(f"{base}{name}.weight", r, columns) for name, r in zip(names, rows, strict=True))
        return Linear(parts, tuple(f"{base}{name}.bias" for name in names) if bias else ())

    def layer_linears(self, i: int) -> dict[str, Linear]:
        c = self.config
        attn, mlp = f"{self.prefix}layers.{i}.self_attn.", f"{self.prefix}layers.{i}.{self.mlp}."
        qkv, both = (c.q_size, c.kv_size, c.kv_size), (c.intermediate_size,) * 2
        return {
            f"{i}.qkv": self._linear(attn, self.qkv_parts, qkv, c.hidden_size, c.qkv_bias),
            f"{i}.out": self._linear(attn, (self.out_part,), (c.hidden_size,), c.q_size, c.out_bias),
            f"{i}.up": self._linear(mlp, self.up_parts, both, c.hidden_size, c.mlp_bias),
            f"{i}.down": self._linear(mlp, (self.down_part,), (c.hidden_size,), c.intermediate_size, c.mlp_bias),
        }

    def layer_vectors(self, i: int) -> dict[str, tuple[str, int]]:
        c, base = self.config, f"{self.prefix}layers.{i}."
        vectors = {f"{i}.{name}": (f"{base}{norm}.weight", c.hidden_size) for name, norm in self.norms.items()}
        if c.qk_norm and c.layer_recurrences[i] is None:
            for name, norm in zip(("norm_q", "norm_k"), self.qk_norms, strict=True):
                vectors[f"{i}.{name}"] = (f"{base}self_attn.{norm}.weight", c.head_dim)
        return vectors

    def final_vectors(self) -> dict[str, tuple[str, int]]:
        return {"norm": (f"{self.prefix}{self.last_norm}.weight", self.config.hidden_size)}

    def pre_attention(self, ops: Ops, i: int, x: Any) -> Any:
        name = "qkv" if self.config.layer_recurrences[i] is None else "in"
        return ops.linear(self._normed(ops, i, "norm_in", x), f"{i}.{name}")

    def post_attention(self, ops: Ops, i: int, x: Any, attention: Any) -> Any:
        x = self._added(ops, i, "norm_attention", x, attention, "out")
        h = ops.gated_linear(self._normed(ops, i, "norm_mlp", x), f"{i}.up", self.config.activation)
        return self._added(ops, i, "norm_down", x, h, "down")

    def _normed(self, ops: Ops, i: int, name: str, x: Any) -> Any:
        return ops.rms_norm(x, f"{i}.{name}", self.config.norm_eps) if name in self.norms else x

    def _added(self, ops: Ops, i: int, norm: str, x: Any, y: Any, name: str) -> Any:
        """Returns x plus a linear layer's outputs of y, normed and scaled where a family does so."""
        factor = self.config.residual_scale
        if norm not in self.norms and factor == 1.0:
            return ops.add_linear(x, y, f"{i}.{name}")
        block = self._normed(ops, i, norm, ops.linear(y, f"{i}.{name}"))
        return ops.add(x, block if factor == 1.0 else ops.scale(block, factor))

    def final_norm(self, ops: Ops, x: Any) -> Any:
        return ops.rms_norm(x, "norm", self.config.norm_eps)

    def head(self, ops: Ops, x: Any) -> Any:
        c, logits = self.config, super().head(ops, x)
        if c.logit_scale != 1.0:
            logits = ops.scale(logits, c.logit_scale)
        return logits if c.logit_cap is None else ops.soft_cap(logits, c.logit_cap)
