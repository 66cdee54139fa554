"""The Llama family: Llama 1 to 3.2, Mistral, Qwen2 (QKV bias), Qwen3 (q/k norm), TinyLlama, SmolLM."""

from __future__ import annotations

from typing import Any

from edgekv.errors import ConfigError
from edgekv.models.architecture import Architecture, Linear, Ops, Part
from edgekv.models.config import CONFIG_HINT, ModelConfig, Raw, activation, check, head_size
from edgekv.models.files import LlamaFile
from edgekv.models.rope import RopeConfig
from edgekv.schema import read

MISTRAL_WINDOW = 4096  # where sliding_window is absent; null means none
OWN_HEAD_DIM = {"qwen3": 128}  # where head_dim is absent


def llama_config(raw: Raw) -> ModelConfig:
    """ModelConfig of a Llama-family config.json."""
    file = read(raw, LlamaFile, "config.json", CONFIG_HINT)
    model_type, hidden, heads = str(raw["model_type"]), file.hidden_size, file.num_attention_heads
    layers = file.num_hidden_layers
    head_dim = file.head_dim or OWN_HEAD_DIM.get(model_type) or head_size(hidden, heads)
    bias = bool(file.attention_bias)
    rope = RopeConfig.from_file(file, head_dim, file.max_position_embeddings or 2048)
    return check(
        ModelConfig(
            model_type=model_type,
            vocab_size=file.vocab_size,
            hidden_size=hidden,
            intermediate_size=file.intermediate_size,
            n_layers=layers,
            n_heads=heads,
            n_kv_heads=file.num_key_value_heads or heads,
            head_dim=head_dim,
            max_positions=rope.max_positions,
            norm_eps=1e-6 if file.rms_norm_eps is None else file.rms_norm_eps,
            activation=activation(file.hidden_act or "silu"),
            tied_embeddings=bool(file.tie_word_embeddings),
            qkv_bias=bias or model_type == "qwen2",
            out_bias=bias and model_type != "qwen2",
            mlp_bias=bool(file.mlp_bias),
            qk_norm=model_type == "qwen3",
            rope=rope,
            layer_windows=windows(raw, file),
            layer_scales=(head_dim**-0.5,) * layers,
        )
    )


def windows(raw: Raw, file: LlamaFile) -> tuple[int | None, ...]:
    """Mistral slides in every layer; Qwen2/3 only with use_sliding_window and from max_window_layers on."""
    layers, is_mistral = file.num_hidden_layers, raw["model_type"] == "mistral"
    window = MISTRAL_WINDOW if is_mistral and "sliding_window" not in raw else file.sliding_window
    slides = is_mistral if file.use_sliding_window is None else file.use_sliding_window
    if window is None or not slides:
        return (None,) * layers
    if file.layer_types is not None:
        if len(file.layer_types) != layers:
            raise ConfigError(f"config.json: layer_types has {len(file.layer_types)} entries for {layers} layers")
        return tuple(window if t == "sliding_attention" else None for t in file.layer_types)
    default = 0 if is_mistral else 28
    first = default if is_mistral or file.max_window_layers is None else file.max_window_layers
    return tuple(window if i >= first else None for i in range(layers))


class Llama(Architecture):
    prefixes = ("model.", "")
    ignored: tuple[str, ...] = (r"rotary_emb\.inv_freq$", r"^lm_head\.weight$")
    read_config = staticmethod(llama_config)
    probe = "embed_tokens.weight"

    def tables(self) -> dict[str, tuple[str, tuple[int, int]]]:
        c = self.config
        return {"embed": (f"{self.prefix}embed_tokens.weight", (c.vocab_size, c.hidden_size))}

    def _linear(
        self, base: str, names: tuple[str, ...], rows: tuple[int, ...], columns: int, bias: bool
    ) -> Linear:
        parts = tuple(Part(f"{base}{name}.weight", r, columns) for name, r in zip(names, rows, strict=True))
        return Linear(parts, tuple(f"{base}{name}.bias" for name in names) if bias else ())

    def layer_linears(self, i: int) -> dict[str, Linear]:
        c = self.config
        attn, mlp = f"{self.prefix}layers.{i}.self_attn.", f"{self.prefix}layers.{i}.mlp."
        qkv = (c.q_size, c.kv_size, c.kv_size)
        both = (c.intermediate_size,) * 2
        return {
            f"{i}.qkv": self._linear(attn, ("q_proj", "k_proj", "v_proj"), qkv, c.hidden_size, c.qkv_bias),
            f"{i}.out": self._linear(attn, ("o_proj",), (c.hidden_size,), c.q_size, c.out_bias),
            f"{i}.up": self._linear(mlp, ("gate_proj", "up_proj"), both, c.hidden_size, c.mlp_bias),
            f"{i}.down": self._linear(mlp, ("down_proj",), (c.hidden_size,), c.intermediate_size, c.mlp_bias),
        }

    def layer_vectors(self, i: int) -> dict[str, tuple[str, int]]:
        c, base = self.config, f"{self.prefix}layers.{i}."
        vectors = {
            f"{i}.norm_in": (f"{base}input_layernorm.weight", c.hidden_size),
            f"{i}.norm_mlp": (f"{base}post_attention_layernorm.weight", c.hidden_size),
        }
        if c.qk_norm:
            vectors[f"{i}.norm_q"] = (f"{base}self_attn.q_norm.weight", c.head_dim)
            vectors[f"{i}.norm_k"] = (f"{base}self_attn.k_norm.weight", c.head_dim)
        return vectors

    def final_vectors(self) -> dict[str, tuple[str, int]]:
        return {"norm": (f"{self.prefix}norm.weight", self.config.hidden_size)}

    def attention_in(self, ops: Ops, i: int, x: Any) -> Any:
        return ops.linear(ops.rms_norm(x, f"{i}.norm_in", self.config.norm_eps), f"{i}.qkv")

    def attention_out(self, ops: Ops, i: int, x: Any, attention: Any) -> Any:
        x = ops.add_linear(x, attention, f"{i}.out")
        h = ops.rms_norm(x, f"{i}.norm_mlp", self.config.norm_eps)
        return ops.add_linear(x, ops.gated_linear(h, f"{i}.up", self.config.activation), f"{i}.down")

    def head(self, ops: Ops, x: Any) -> Any:
        return ops.linear(ops.rms_norm(x, "norm", self.config.norm_eps), "head")
