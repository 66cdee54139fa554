"""OLMo 2: norms behind attention and MLP instead of before them, and one over all queries, one over all keys."""

from __future__ import annotations

from typing import Any

from edgekv.models.architecture import Ops
from edgekv.models.config import CONFIG_HINT, ModelConfig, Raw
from edgekv.models.files import Olmo2File
from edgekv.models.llama import Llama, decoder_config
from edgekv.schema import read

NORMS = {"norm_attention": "post_attention_layernorm", "norm_down": "post_feedforward_layernorm"}


def olmo2_config(raw: Raw) -> ModelConfig:
    """ModelConfig of an OLMo 2 config.json."""
    return decoder_config("olmo2", read(raw, Olmo2File, "config.json", CONFIG_HINT), mlp_bias=False)


class Olmo2(Llama):
    """Llama with its norms in other places."""

    read_config = staticmethod(olmo2_config)
    norms = NORMS

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
