"""The published shapes of models/*.json, and the tensors that a config asks for."""

import math
from pathlib import Path
from typing import Any

import pytest

from edgekv.checkpoint.checkpoint import read_config
from edgekv.checkpoint.shipped import load_shape
from edgekv.errors import ConfigError
from edgekv.models import architecture

MODELS = Path(__file__).resolve().parent.parent / "models"
PUBLISHED_PARAMETERS = {
    "gemma2-2b": 2_614_341_888,
    "gemma3-1b": 999_885_952,
    "gemma3-270m": 268_098_176,
    "gemma3-4b": 3_880_263_168,
    "gpt-oss-20b": 20_914_757_184,
    "gpt2": 124_439_808,
    "gpt2-large": 774_030_080,
    "gpt2-medium": 354_823_168,
    "gpt2-xl": 1_557_611_200,
    "granite3.3-2b": 2_533_539_840,
    "granite3.3-8b": 8_170_864_640,
    "h1b-60m": 67_755_520,  # the paper says 60M; its layers, width, vocabulary and 8k learned positions give this
    "lfm2-1.2b": 1_170_340_608,
    "lfm2-350m": 354_483_968,
    "llama2-7b": 6_738_415_616,
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "ministral3-3b": 3_429_006_336,
    "ministral3-8b": 8_489_553_920,
    "mixtral-8x7b": 46_702_792_704,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "phi3-mini-4k": 3_821_079_552,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3.5-0.8b": 752_393_024,  # of the decoder, as are the next two
    "qwen3.5-2b": 1_881_825_088,
    "qwen3.5-4b": 4_205_751_296,
    "smollm3-3b": 3_075_098_624,
    "tiny": 2_492_672,
    "tinyllama": 1_100_048_384,
}

LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 300,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}


def tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return dict(architecture(config).tensors())


def test_every_shape_has_its_published_size() -> None:
    files = MODELS.glob("*.json")
    found = {path.stem: sum(map(math.prod, tensors(read_config(path)).values())) for path in files}
    assert found == PUBLISHED_PARAMETERS


QKV_BIAS = ["q_proj.bias (32,)", "k_proj.bias (16,)", "v_proj.bias (16,)"]


@pytest.mark.parametrize(
    ("changes", "added", "removed"),
    [
        ({}, [], []),
        ({"tie_word_embeddings": True}, [], ["lm_head.weight"]),
        ({"model_type": "mistral"}, [], []),
        ({"model_type": "qwen2"}, QKV_BIAS, []),
        ({"model_type": "qwen3", "head_dim": 8}, ["q_norm.weight (8,)", "k_norm.weight (8,)"], []),
        ({"attention_bias": True}, [*QKV_BIAS, "o_proj.bias (32,)"], []),
    ],
)
def test_llama_tensors(changes: dict[str, Any], added: list[str], removed: list[str]) -> None:
    plain = {
        "model.embed_tokens.weight (300, 32)",
        "model.norm.weight (32,)",
        "lm_head.weight (300, 32)",
    }
    layer = {
        "input_layernorm.weight (32,)",
        "self_attn.q_proj.weight (32, 32)",
        "self_attn.k_proj.weight (16, 32)",
        "self_attn.v_proj.weight (16, 32)",
        "self_attn.o_proj.weight (32, 32)",
        "post_attention_layernorm.weight (32,)",
        "mlp.gate_proj.weight (48, 32)",
        "mlp.up_proj.weight (48, 32)",
        "mlp.down_proj.weight (32, 48)",
    } | {f"self_attn.{row}" for row in added}
    expected = plain | {f"model.layers.{i}.{row}" for i in (0, 1) for row in layer}
    found = {f"{name} {shape}" for name, shape in tensors(LLAMA | changes).items()}
    assert found == {row for row in expected if row.split()[0] not in removed}


def test_explicit_head_dim_and_mlp_bias() -> None:
    found = tensors(LLAMA | {"head_dim": 16, "mlp_bias": True})
    assert found["model.layers.1.self_attn.q_proj.weight"] == (64, 32)
    assert found["model.layers.1.self_attn.o_proj.weight"] == (32, 64)
    assert found["model.layers.1.mlp.up_proj.bias"] == (48,)


def test_gpt2_tensors_have_the_conv1d_layout() -> None:
    found = tensors(GPT2)
    assert len(found) == 2 + 2 * 12 + 2
    assert found["transformer.wpe.weight"] == (64, 32)
    assert found["transformer.h.1.attn.c_attn.weight"] == (32, 96)
    assert found["transformer.h.1.mlp.c_fc.weight"] == (32, 128)
    assert found["transformer.h.1.mlp.c_proj.weight"] == (128, 32)
    assert "lm_head.weight" not in found


def test_unknown_shape_lists_the_known() -> None:
    with pytest.raises(ConfigError) as error:
        load_shape("llama9")
    for part in ("llama9", "tinyllama", "gpt2-xl"):
        assert part in str(error.value)
