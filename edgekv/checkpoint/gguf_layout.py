"""GGUF's metadata and tensor names as those of the Hugging Face checkpoint that they were made from.

Sources: llama.cpp's gguf-py/gguf/constants.py and conversion/.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from edgekv.errors import ConfigError

Metadata = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]  # GGUF tensor name -> shape, rows first

ALL_LENGTHS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_FACTORS = (ALL_LENGTHS, LONG, SHORT)
"""Tensors of divisors of each frequency: of Llama 3.1's scaling, and of longrope beyond the original length and
up to it."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a file says: its metadata, its tensors' shapes, and the values of those in ROPE_FACTORS."""

    metadata: Metadata
    shapes: Shapes
    factors: Mapping[str, list[float]]

    def get(self, key: str, default: Any = None) -> Any:
        """Of the architecture's own metadata."""
        return self.metadata.get(f"{self.metadata['general.architecture']}.{key}", default)


def _as_it_is(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    return config


@dataclasses.dataclass(frozen=True)
class Family:
    """How one architecture is written.

    names: GGUF tensor, without its ending, to ours; ``{i}`` is the layer. keys: entry of config.json to metadata
    key behind the architecture's name. interleaved: rows of the query and key projections are ordered for
    rotations of neighbouring channels. conv1d: projections that the checkpoint stores transposed. norm_offset:
    what the file has added to the norms. finished: the config, with what the keys alone do not say.
    """

    model_type: str
    names: Mapping[str, str]
    keys: Mapping[str, str]
    interleaved: tuple[str, ...] = ()
    conv1d: tuple[str, ...] = ()
    norm_offset: float = 0.0
    finished: Callable[[Facts, dict[str, Any]], dict[str, Any]] = _as_it_is


LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{i}.attn_norm": "model.layers.{i}.input_layernorm",
    "blk.{i}.attn_q": "model.layers.{i}.self_attn.q_proj",
    "blk.{i}.attn_k": "model.layers.{i}.self_attn.k_proj",
    "blk.{i}.attn_v": "model.layers.{i}.self_attn.v_proj",
    "blk.{i}.attn_q_norm": "model.layers.{i}.self_attn.q_norm",
    "blk.{i}.attn_k_norm": "model.layers.{i}.self_attn.k_norm",
    "blk.{i}.attn_output": "model.layers.{i}.self_attn.o_proj",
    "blk.{i}.ffn_norm": "model.layers.{i}.post_attention_layernorm",
    "blk.{i}.ffn_gate": "model.layers.{i}.mlp.gate_proj",
    "blk.{i}.ffn_up": "model.layers.{i}.mlp.up_proj",
    "blk.{i}.ffn_down": "model.layers.{i}.mlp.down_proj",
}
LLAMA_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "head_dim": "attention.key_length",
}
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
POST_NORMS = {
    "blk.{i}.post_attention_norm": "model.layers.{i}.post_attention_layernorm",
    "blk.{i}.post_ffw_norm": "model.layers.{i}.post_feedforward_layernorm",
}
GEMMA_NAMES = LLAMA_NAMES | POST_NORMS | {"blk.{i}.ffn_norm": "model.layers.{i}.pre_feedforward_layernorm"}
GEMMA_KEYS = LLAMA_KEYS | {
    "sliding_window": "attention.sliding_window",
    "final_logit_softcapping": "final_logit_softcapping",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "rope_local_base_freq": "rope.freq_base_swa",
}
GEMMA_27B = {"gemma2": 46, "gemma3": 62}  # layers of the sizes whose scores have a scale of their own
SLIDING_OF = {"gemma2": 2, "gemma3": 6}  # of so many layers one sees everything
PHI3_NAMES = {
    **{theirs: ours for theirs, ours in LLAMA_NAMES.items() if "attn_" not in theirs and "ffn_" not in theirs},
    "blk.{i}.attn_norm": "model.layers.{i}.input_layernorm",
    "blk.{i}.attn_qkv": "model.layers.{i}.self_attn.qkv_proj",
    "blk.{i}.attn_output": "model.layers.{i}.self_attn.o_proj",
    "blk.{i}.ffn_norm": "model.layers.{i}.post_attention_layernorm",
    "blk.{i}.ffn_up": "model.layers.{i}.mlp.gate_up_proj",
    "blk.{i}.ffn_down": "model.layers.{i}.mlp.down_proj",
}
PHI3_KEYS = LLAMA_KEYS | {
    "sliding_window": "attention.sliding_window",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
}
OLMO2_NAMES = LLAMA_NAMES | POST_NORMS
GRANITE_SCALES = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
MOST_LAYERS = 1 << 12  # more than any config may have


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _gemma(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    """The scale of the scores, which no key has, as llama.cpp chooses it; and the layers that slide."""
    name, layers = facts.metadata["general.architecture"], config["num_hidden_layers"]
    head_dim = _head_dim(config)
    wide = config["hidden_size"] // config["num_attention_heads"]
    scalar = wide if layers == GEMMA_27B[name] else head_dim
    slides = facts.get("attention.sliding_window_pattern", SLIDING_OF[name])
    if not isinstance(slides, list):
        slides = [slides == 0 or (i + 1) % slides != 0 for i in range(min(layers, MOST_LAYERS))]
    if name == "gemma3" and not config.get("sliding_window"):
        slides = [False] * len(slides)
    types = ["sliding_attention" if each else "full_attention" for each in slides]
    return {**config, "head_dim": head_dim, "query_pre_attn_scalar": scalar, "layer_types": types}


def _phi3(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    """A window of 0 tokens is none; heads may be rotated in part."""
    head_dim = _head_dim(config)
    rotated = facts.get("rope.dimension_count", head_dim)
    share = math.nextafter(rotated / head_dim, 1.0)  # so that the product, cut to a whole number, is `rotated`
    return {**config, "sliding_window": config.get("sliding_window") or None, "partial_rotary_factor": share}


def _olmo2(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    if facts.get("attention.sliding_window"):
        raise ConfigError("GGUF architecture 'olmo2' with sliding layers, as OLMo 3 has them, is not supported")
    return config


def _granite(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    """A factor of 0 stands for none, as in llama.cpp; the scale of scores is then the usual one."""
    if facts.get("rope.scaling.finetuned") is False:
        raise ConfigError("GGUF architecture 'granite' without rotations is not supported")
    given = {entry: value for entry, value in config.items() if value or entry not in GRANITE_SCALES}
    return {"attention_multiplier": _head_dim(config) ** -0.5, **given}


FAMILIES: dict[str, Family] = {
    "llama": Family("llama", LLAMA_NAMES, LLAMA_KEYS, interleaved=("attn_q", "attn_k")),
    "qwen2": Family("qwen2", LLAMA_NAMES, LLAMA_KEYS),
    "qwen3": Family("qwen3", LLAMA_NAMES, LLAMA_KEYS),
    "gemma2": Family("gemma2", GEMMA_NAMES, GEMMA_KEYS, norm_offset=1.0, finished=_gemma),
    "gemma3": Family("gemma3_text", GEMMA_NAMES, GEMMA_KEYS, norm_offset=1.0, finished=_gemma),
    "phi3": Family("phi3", PHI3_NAMES, PHI3_KEYS, finished=_phi3),
    "smollm3": Family("smollm3", LLAMA_NAMES, LLAMA_KEYS, interleaved=("attn_q", "attn_k")),
    "olmo2": Family("olmo2", OLMO2_NAMES, LLAMA_KEYS, finished=_olmo2),
    "granite": Family(
        "granite", LLAMA_NAMES, LLAMA_KEYS | GRANITE_SCALES, interleaved=("attn_q", "attn_k"), finished=_granite
    ),
    "gpt2": Family("gpt2", GPT2_NAMES, GPT2_KEYS, conv1d=("attn_qkv", "attn_output", "ffn_up", "ffn_down")),
}


def find_family(metadata: Metadata) -> Family:
    """Raises ConfigError for an architecture that is not among FAMILIES."""
    name = metadata.get("general.architecture")
    if name not in FAMILIES:
        raise ConfigError(f"GGUF architecture {name!r} is not supported; supported: {', '.join(FAMILIES)}")
    if metadata.get(f"{name}.expert_count"):
        raise ConfigError("GGUF files with experts are not supported; give the model's safetensors checkpoint")
    return FAMILIES[name]


def checkpoint_name(family: Family, name: str) -> str:
    """The checkpoint's name of a GGUF tensor; an unknown one keeps its own."""
    layer = re.match(r"blk\.(\d+)\.", name)
    base, dot, end = name.rpartition(".")
    pattern = base.replace(layer[0], "blk.{i}.") if layer else base
    if pattern not in family.names:
        return name
    return family.names[pattern].format(i=layer[1] if layer else "") + dot + end


def make_config(facts: Facts) -> dict[str, Any]:
    """config.json of the model. Raises ConfigError where the metadata lack something."""
    family = find_family(facts.metadata)
    values = {entry: facts.get(key) for entry, key in family.keys.items() if facts.get(key) is not None}
    if "token_embd.weight" not in facts.shapes:
        raise ConfigError("the GGUF file has no tensor token_embd.weight: it is no language model")
    config = {
        "model_type": family.model_type,
        **values,
        "vocab_size": facts.shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in facts.shapes,
        "attention_bias": "blk.0.attn_q.bias" in facts.shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in facts.shapes,
    }
    scaling = _rope_scaling(facts, int(values.get("max_position_embeddings", 0)))
    return family.finished(facts, config | ({"rope_scaling": scaling} if scaling else {}))


def _rope_scaling(facts: Facts, positions: int) -> dict[str, Any] | None:
    kind, factor = facts.get("rope.scaling.type", "none"), facts.get("rope.scaling.factor", 1.0)
    original = facts.get("rope.scaling.original_context_length")
    if ALL_LENGTHS in facts.factors:  # whatever the length: LongRoPE with equal sets
        same = dict.fromkeys(("short_factor", "long_factor"), facts.factors[ALL_LENGTHS])
        return {
            "rope_type": "longrope",
            "original_max_position_embeddings": positions,
            **same,
            "attention_factor": 1.0,
        }
    scaling = {"original_max_position_embeddings": original} if original else {}
    if LONG in facts.factors or SHORT in facts.factors:
        for name, side in ((LONG, "long_factor"), (SHORT, "short_factor")):
            if name not in facts.factors:
                raise ConfigError(f"the GGUF file has no tensor {name}, but the other of the two")
            scaling[side] = facts.factors[name]
        attention = facts.get("rope.scaling.attn_factor")
        return {"rope_type": "longrope", **scaling, **({"attention_factor": attention} if attention else {})}
    return None if kind == "none" else {"rope_type": kind, "factor": factor, **scaling}
