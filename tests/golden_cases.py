"""Tiny random models of every architecture and option: configs here, weights from a seed, goldens beside.

tools/golden/logits.py runs them through transformers and writes tests/golden/*.npz.
"""

import json
import pathlib
import zlib
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from edgekv.models import architecture

N_TOKENS, VOCAB = 48, 96

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": VOCAB, "n_positions": 64, "n_embd": 48, "n_layer": 3, "n_head": 3,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [1.5 + 0.4 * i for i in range(8)],
    "original_max_position_embeddings": 32,
}

V5 = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
GEMMA3 = V5 | {
    "model_type": "gemma3_text", "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 24,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 20, "sliding_window": 12,
    "tie_word_embeddings": True,
}  # fmt: skip
GEMMA2 = {k: v for k, v in GEMMA3.items() if k != "rope_theta"} | {"model_type": "gemma2", "num_hidden_layers": 3}
PHI3 = LLAMA | {"model_type": "phi3", "num_key_value_heads": 2, "pad_token_id": 0}
PHI_LONG = LONGROPE | {"type": "longrope"}
SMOLLM3 = LLAMA | {"model_type": "smollm3", "num_key_value_heads": 2, "pad_token_id": 0}
OLMO2 = LLAMA | {"model_type": "olmo2", "num_key_value_heads": 2}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 0.7,
}
GRANITE = LLAMA | {"model_type": "granite", "num_key_value_heads": 2}
MINISTRAL3 = V5 | {"model_type": "ministral3", "num_key_value_heads": 2, "head_dim": 24, "pad_token_id": 0}
BETA = {"llama_4_scaling_beta": 0.2, "original_max_position_embeddings": 12}
GROWING = {
    "rope_type": "yarn", "rope_theta": 20000.0, "factor": 8.0, "original_max_position_embeddings": 8,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
}  # fmt: skip
QWEN3_MOE = LLAMA | {
    "model_type": "qwen3_moe", "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True,
}  # fmt: skip
MIXTRAL = LLAMA | {
    "model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
GPT_OSS = V5 | {
    "model_type": "gpt_oss", "num_key_value_heads": 2, "head_dim": 24, "num_local_experts": 4,
    "num_experts_per_tok": 2, "sliding_window": 12, "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 20000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 16,
    },
}  # fmt: skip

LFM2 = {
    "model_type": "lfm2", "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 132,
    "block_multiple_of": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "full_attn_idxs": [1, 3],
}  # fmt: skip
QWEN3_5 = V5 | {
    "model_type": "qwen3_5_text", "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 32,
    "linear_key_head_dim": 16, "linear_value_head_dim": 40, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip

CASES: dict[str, dict[str, Any]] = {
    "llama1": LLAMA,
    "llama2-gqa": LLAMA | {"num_key_value_heads": 2},
    "llama-mqa": LLAMA | {"num_key_value_heads": 1},
    "llama-tied-smollm": LLAMA | {"num_key_value_heads": 2, "tie_word_embeddings": True, "rope_theta": 1e5},
    "llama-head-dim": LLAMA | {"head_dim": 24, "num_key_value_heads": 2},
    "llama-biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama31": LLAMA | {"num_key_value_heads": 2, "rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "rope-linear": LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "rope-yarn": LLAMA
    | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "rope-longrope": LLAMA | {"rope_scaling": LONGROPE},
    "rope-v5-parameters": {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    | {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 20000.0}},
    "mistral": LLAMA | {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 12},
    "qwen2": LLAMA | {"model_type": "qwen2", "num_key_value_heads": 2, "rope_theta": 1e6},
    "qwen2-sliding": LLAMA
    | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1},
    "qwen3": LLAMA | {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 32},
    "gemma2": GEMMA2 | {"query_pre_attn_scalar": 1},
    "gemma2-options": GEMMA2 | {
        "query_pre_attn_scalar": 1, "attn_logit_softcapping": 1.5, "final_logit_softcapping": None,
        "attention_bias": True,
        "layer_types": ["full_attention", "full_attention", "sliding_attention"],
    },
    "gemma3": GEMMA3,
    "gemma3-options": GEMMA3 | {
        "sliding_window_pattern": 2, "rope_theta": 50000.0, "rope_local_base_freq": 500.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "final_logit_softcapping": 2.0,
        "attention_bias": True, "tie_word_embeddings": False,
    },
    "gemma3-v5-parameters": GEMMA3 | {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 30000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
        },
    },
    "phi3": PHI3 | {"sliding_window": 20},
    "phi3-partial": PHI3 | {"partial_rotary_factor": 0.75, "tie_word_embeddings": True},
    "phi3-longrope": PHI3 | {"original_max_position_embeddings": 32, "rope_scaling": PHI_LONG},
    "phi3-longrope-partial": PHI3 | {
        "partial_rotary_factor": 0.5, "original_max_position_embeddings": 64, "max_position_embeddings": 256,
        "rope_scaling": {
            "type": "longrope", "short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [2.0, 3.0, 5.0, 9.0],
        },
    },
    "smollm3": SMOLLM3 | {"num_hidden_layers": 5, "tie_word_embeddings": True},
    "smollm3-options": SMOLLM3 | {
        "no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 10, "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    },
    "olmo2": OLMO2,
    "olmo2-biases": OLMO2 | {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True},
    "granite": GRANITE | MULTIPLIERS | {"tie_word_embeddings": True},
    "granite-options": GRANITE | {"attention_bias": True, "mlp_bias": True},
    "ministral3": MINISTRAL3 | {"rope_parameters": GROWING},
    "ministral3-sliding": MINISTRAL3
    | {"sliding_window": 12, "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0} | BETA},
    "qwen3-moe": QWEN3_MOE,
    "qwen3-moe-options": QWEN3_MOE | {
        "num_hidden_layers": 5, "norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [1],
        "attention_bias": True, "use_sliding_window": True, "sliding_window": 12, "tie_word_embeddings": True,
    },
    "mixtral": MIXTRAL,
    "mixtral-options": MIXTRAL | {
        "num_local_experts": 3, "num_experts_per_tok": 1, "head_dim": 24, "sliding_window": 12,
        "hidden_act": "gelu", "tie_word_embeddings": True,
    },
    "gpt-oss": GPT_OSS,
    "gpt-oss-options": GPT_OSS | {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"],
        "attention_bias": False, "swiglu_alpha": 1.3, "swiglu_limit": 0.5, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "lfm2": LFM2,
    "lfm2-options": LFM2 | {
        "layer_types": ["full_attention", "conv", "conv", "full_attention"], "conv_bias": True,
        "conv_L_cache": 4, "block_ffn_dim_multiplier": 1.3, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 20000.0},
    },
    "lfm2-published": {k: v for k, v in LFM2.items() if k != "intermediate_size"} | {
        "block_ff_dim": 96, "block_auto_adjust_ff_dim": False, "tie_embedding": True, "norm_eps": 1e-4,
        "conv_L_cache": 2, "rope_theta": 1000000.0,
    },
    "qwen3_5": QWEN3_5,
    "qwen3_5-options": QWEN3_5 | {
        "full_attention_interval": 2, "linear_conv_kernel_dim": 3, "linear_value_head_dim": 64,
        "linear_num_key_heads": 3, "linear_num_value_heads": 3, "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "linear", "factor": 2.0, "rope_theta": 20000.0, "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2], "mrope_interleaved": True,
        },
    },
    "qwen3_5-layers": QWEN3_5 | {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "rope_theta": 5000.0,
    },
    "gpt2": GPT2,
    "gpt2-options": GPT2 | {"n_inner": 80, "activation_function": "gelu", "scale_attn_by_inverse_layer_idx": True},
}  # fmt: skip

GGUF_CASES: dict[str, dict[str, Any]] = {
    **{name: CASES[name] for name in ("llama31", "llama2-gqa", "qwen2", "qwen3", "granite")},
    **{name: CASES[name] for name in ("phi3", "phi3-partial", "phi3-longrope", "phi3-longrope-partial")},
    "gemma2": GEMMA2
    | {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 5.0},
    "gemma3": GEMMA3 | {"num_hidden_layers": 7, "query_pre_attn_scalar": 24, "rope_theta": 50000.0},
    "gemma3-options": GEMMA3 | {
        "num_hidden_layers": 6, "query_pre_attn_scalar": 24, "rope_local_base_freq": 500.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "final_logit_softcapping": 2.0,
        "tie_word_embeddings": False,
    },
    "smollm3": SMOLLM3 | {"num_hidden_layers": 5, "tie_word_embeddings": True},
    "olmo2": OLMO2,
    "granite-plain": GRANITE | {"attention_bias": True, "mlp_bias": True},
}  # fmt: skip
GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM", "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM", "olmo2": "Olmo2ForCausalLM", "granite": "GraniteForCausalLM",
}  # fmt: skip
"""Models that llama.cpp's converter has written, tests/golden/gguf.json; what GGUF has no key for is as llama.cpp
assumes it. And config.json's model_type -> what its ``architectures`` names, by which the converter chooses."""


def tokens(name: str) -> list[int]:
    return [int(t) for t in _rng(name, "tokens").integers(0, VOCAB, N_TOKENS)]


def tensors(name: str) -> dict[str, np.ndarray]:
    """Returns every tensor of the case in the checkpoint's names and layout, float32."""
    shapes = architecture(CASES[name]).tensors()
    return {tensor: draw(name, tensor, shape) for tensor, shape in shapes.items()}


def published(name: str) -> dict[str, np.ndarray]:
    """Returns the tensors as a checkpoint has them: GPT-OSS's experts in one tensor, gate and up by turns."""
    arrays = tensors(name)
    if CASES[name]["model_type"] != "gpt_oss":
        return arrays
    whole: dict[str, np.ndarray] = {}
    experts = range(CASES[name]["num_local_experts"])
    for i in range(CASES[name]["num_hidden_layers"]):
        base = f"model.layers.{i}.mlp.experts."
        for end, ours in (("", "weight"), ("_bias", "bias")):
            gate, up, down = (
                np.stack([arrays.pop(f"{base}{e}.{part}_proj.{ours}").T for e in experts])
                for part in ("gate", "up", "down")
            )
            both = np.stack([gate, up], axis=-1)
            whole[f"{base}gate_up_proj{end}"] = both.reshape(*both.shape[:-2], -1)
            whole[f"{base}down_proj{end}"] = down
    return arrays | whole


def write_checkpoint(name: str, folder: pathlib.Path, **changes: object) -> pathlib.Path:
    """Writes the case as an ordinary Hugging Face folder. changes: other fields of its config."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(published(name), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CASES[name] | changes))
    return folder


def _rng(*key: str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(zlib.crc32("/".join(key).encode())))


def draw(name: str, tensor: str, shape: tuple[int, ...]) -> np.ndarray:
    x = _rng(name, tensor).standard_normal(shape)
    norm = len(shape) == 1 and tensor.endswith(".weight")
    if len(shape) == 3:  # a convolution, of which norms follow: small sums would be all rounding
        return (0.6 * x).astype(np.float32)
    return (1 + 0.2 * x if norm else 0.15 * x).astype(np.float32)


def write_published_gpt2(shared: pathlib.Path, folder: pathlib.Path) -> Any:
    """Writes the checkpoint `tiny_random_gpt2` of the test material to a folder; returns its published results."""
    arrays = np.load(shared / "models" / "tiny_random_gpt2" / "tiny_random_gpt2.npz")
    config = {
        "model_type": "gpt2", "vocab_size": 1000, "n_positions": 512, "n_embd": 32, "n_layer": 5, "n_head": 4,
    }  # fmt: skip
    contiguous = {name: np.ascontiguousarray(array, np.float32) for name, array in arrays.items()}
    save_file(contiguous, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return json.loads((shared / "golden" / "tiny_random_gpt2_golden.json").read_text())
