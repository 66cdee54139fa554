"""OLMo 2: norms behind attention and MLP instead of before them, and one over all queries, one over all keys."""

from __future__ import annotations

from typing import Any

from edgekv.errors import ConfigError
from edgekv.models.architecture import Ops
from edgekv.models.config import Epsilon, ModelConfig, Raw
from edgekv.models.gguf import LLAMA_KEYS, LLAMA_NAMES, POST_NORMS, GgufMetadata, GgufNames
from edgekv.models.llama import Llama, LlamaConfigSchema, llama_config

NORMS = {"norm_attention": "post_attention_layernorm", "norm_down": "post_feedforward_layernorm"}


class Olmo2ConfigSchema(LlamaConfigSchema):
    """olmo2."""

    rms_norm_eps: Epsilon | None = 1e-5


def _from_gguf(facts: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    if facts.get("attention.sliding_window"):
        raise ConfigError("GGUF architecture 'olmo2' with sliding layers, as OLMo 3 has them, is not supported")
    return config


class Olmo2(Llama):
    """Llama with its norms in other places."""

    schema = Olmo2ConfigSchema
    gguf = GgufNames("olmo2", "olmo2", LLAMA_NAMES | POST_NORMS, LLAMA_KEYS, finish=_from_gguf)
    norms = NORMS

    @classmethod
    def model_config(cls, file: Olmo2ConfigSchema, raw: Raw) -> ModelConfig:
        return llama_config("olmo2", file, mlp_bias=False)

    def layer_vectors(self, i: int) -> dict[str, tuple[str, int]]:
        c, attn = self.config, f"{self.prefix}layers.{i}.self_attn."
        return {
            **super().layer_vectors(i),
            f"{i}.norm_queries": (f"{attn}q_norm.weight", c.q_size),
            f"{i}.norm_keys": (f"{attn}k_norm.weight", c.kv_size),
        }

    def attention_in(self, ops: Ops, i: int, x: Any) -> Any:
        c = self.config
        q, k, v = ops.split(super().attention_in(ops, i, x), (c.q_size, c.kv_size, c.kv_size))
        q = ops.rms_norm(q, f"{i}.norm_queries", c.norm_eps)
        k = ops.rms_norm(k, f"{i}.norm_keys", c.norm_eps)
        return ops.join((q, k, v))
