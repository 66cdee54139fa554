"""GPT-2: learned positions, LayerNorm with bias, Conv1D weights stored (inputs, outputs)."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from edgekv.errors import ConfigError
from edgekv.models.architecture import Architecture, Linear, Ops, WeightPart
from edgekv.models.config import (
    CONFIG_HINT,
    Epsilon,
    Heads,
    Layers,
    ModelConfig,
    Raw,
    Vocabulary,
    Width,
    activation,
    head_size,
)
from edgekv.models.gguf import GgufNames
from edgekv.models.llama import LlamaConfigSchema, llama_config
from edgekv.models.rope import Positions

GPT2_NAMES = {
    "token_embd": "wte",
    "position_embd": "wpe",
    "output_norm": "ln_f",
    "output": "lm_head",
    "blk.{i}.attn_norm": "h.{i}.ln_1",
    "blk.{i}.attn_qkv": "h.{i}.attn.c_attn",
    "blk.{i}.attn_output": "h.{i}.attn.c_proj",
    "blk.{i}.ffn_norm": "h.{i}.ln_2",
    "blk.{i}.ffn_up": "h.{i}.mlp.c_fc",
    "blk.{i}.ffn_down": "h.{i}.mlp.c_proj",
}
GPT2_KEYS = {
    "n_embd": "embedding_length",
    "n_inner": "feed_forward_length",
    "n_layer": "block_count",
    "n_head": "attention.head_count",
    "n_positions": "context_length",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
}


class GPT2ConfigSchema(Struct):
    """The fields of GPT-2's config.json; n_ctx is an older name of n_positions."""

    n_embd: Width
    n_head: Heads
    n_layer: Layers
    vocab_size: Vocabulary
    n_positions: Positions | None = None
    n_ctx: Positions | None = None
    n_inner: Width | None = None
    layer_norm_epsilon: Epsilon = 1e-5
    activation_function: str = "gelu_new"
    tie_word_embeddings: bool = True
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False


class GPT2(Architecture):
    """GPT-2: learned positions, layer norms with biases, fused projections stored transposed."""

    prefixes = ("transformer.", "")
    ignored = (r"\.attn\.(masked_)?bias$", r"^lm_head\.weight$")
    schema = GPT2ConfigSchema
    gguf = GgufNames(
        "gpt2", "gpt2", GPT2_NAMES, GPT2_KEYS, conv1d=("attn_qkv", "attn_output", "ffn_up", "ffn_down")
    )
    layers_key, positions_key = "n_layer", "n_positions"
    required_tensor = "wte.weight"

    @classmethod
    def model_config(cls, file: GPT2ConfigSchema, raw: Raw) -> ModelConfig:
        hidden, heads, layers = file.n_embd, file.n_head, file.n_layer
        positions = file.n_positions or file.n_ctx
        if positions is None:
            raise ConfigError(f"config.json: 'n_positions' is missing; {CONFIG_HINT}")
        head_dim = head_size(hidden, heads)
        if heads * head_dim != hidden:
            raise ConfigError(f"config.json: n_embd {hidden} is no multiple of n_head {heads}")
        scale = head_dim**-0.5 if file.scale_attn_weights else 1.0
        divisors = [i + 1 if file.scale_attn_by_inverse_layer_idx else 1 for i in range(layers)]
        overrides: dict[str, Any] = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True)
        overrides |= {"max_positions": positions, "norm_eps": file.layer_norm_epsilon}
        overrides |= {"tied_embeddings": file.tie_word_embeddings, "layer_ropes": (None,) * layers}
        overrides |= {"layer_scales": tuple(scale / divisor for divisor in divisors)}
        overrides["activation"] = activation(file.activation_function or "gelu_new")
        sizes = hidden, file.n_inner or 4 * hidden, layers, heads, file.vocab_size
        return llama_config("gpt2", LlamaConfigSchema(*sizes), **overrides)

    def tables(self) -> dict[str, tuple[str, tuple[int, int]]]:
        c = self.config
        return {
            "embed": (f"{self.prefix}wte.weight", (c.vocab_size, c.hidden_size)),
            "positions": (f"{self.prefix}wpe.weight", (c.max_positions, c.hidden_size)),
        }

    def layer_linears(self, i: int) -> dict[str, Linear]:
        c, base = self.config, f"{self.prefix}h.{i}."
        shapes = {
            f"{i}.qkv": ("attn.c_attn", 3 * c.hidden_size, c.hidden_size),
            f"{i}.out": ("attn.c_proj", c.hidden_size, c.hidden_size),
            f"{i}.up": ("mlp.c_fc", c.intermediate_size, c.hidden_size),
            f"{i}.down": ("mlp.c_proj", c.hidden_size, c.intermediate_size),
        }
        return {
            name: Linear((WeightPart(f"{base}{of}.weight", rows, columns, True),), (f"{base}{of}.bias",))
            for name, (of, rows, columns) in shapes.items()
        }

    def _norm(self, name: str, tensor: str) -> dict[str, tuple[str, int]]:
        return {f"{name}{end}": (f"{tensor}{end}", self.config.hidden_size) for end in (".weight", ".bias")}

    def layer_vectors(self, i: int) -> dict[str, tuple[str, int]]:
        base = f"{self.prefix}h.{i}."
        return {**self._norm(f"{i}.norm_in", f"{base}ln_1"), **self._norm(f"{i}.norm_mlp", f"{base}ln_2")}

    def final_vectors(self) -> dict[str, tuple[str, int]]:
        return self._norm("norm", f"{self.prefix}ln_f")

    def pre_attention(self, ops: Ops, i: int, x: Any) -> Any:
        return ops.linear(ops.layer_norm(x, f"{i}.norm_in", self.config.norm_eps), f"{i}.qkv")

    def post_attention(self, ops: Ops, i: int, x: Any, attention: Any) -> Any:
        x = ops.add_linear(x, attention, f"{i}.out")
        h = ops.linear(ops.layer_norm(x, f"{i}.norm_mlp", self.config.norm_eps), f"{i}.up")
        return ops.add_linear(x, ops.activation(h, self.config.activation), f"{i}.down")

    def final_norm(self, ops: Ops, x: Any) -> Any:
        return ops.layer_norm(x, "norm", self.config.norm_eps)
