"""Tiny random models that llama.cpp's own converter has written as GGUF: tests/golden/gguf.json has what it wrote.

tools/golden/gguf_files.py writes that. What GGUF has no key for is as llama.cpp assumes it.
"""

from __future__ import annotations

from typing import Any

from golden_cases import CASES as GOLDEN
from golden_cases import GEMMA2, GEMMA3, GRANITE, OLMO2, SMOLLM3

CASES: dict[str, dict[str, Any]] = {
    **{name: GOLDEN[name] for name in ("llama31", "llama2-gqa", "qwen2", "qwen3", "granite")},
    **{name: GOLDEN[name] for name in ("phi3", "phi3-partial", "phi3-longrope", "phi3-longrope-partial")},
    "gemma2": GEMMA2
    | {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 5.0},
    "gemma3": GEMMA3 | {"num_hidden_layers": 7, "query_pre_attn_scalar": 24, "rope_theta": 50000.0},
    "gemma3-options": GEMMA3
    | {
        "num_hidden_layers": 6,
        "query_pre_attn_scalar": 24,
        "rope_local_base_freq": 500.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "final_logit_softcapping": 2.0,
        "tie_word_embeddings": False,
    },
    "smollm3": SMOLLM3 | {"num_hidden_layers": 5, "tie_word_embeddings": True},
    "olmo2": OLMO2,
    "granite-plain": GRANITE | {"attention_bias": True, "mlp_bias": True},
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "granite": "GraniteForCausalLM",
}
"""config.json's model_type -> what its ``architectures`` names, by which the converter chooses."""
