"""Qwen 2 (biases of queries, keys and values) and Qwen 3 (q/k norms): Llama whose upper layers may slide."""

from __future__ import annotations

from edgekv.models.config import CONFIG_HINT, ModelConfig, Raw, sliding_layers
from edgekv.models.files import Qwen3File, QwenFile
from edgekv.models.llama import Llama, decoder_config
from edgekv.schema import read


def qwen2_config(raw: Raw) -> ModelConfig:
    """ModelConfig of a Qwen 2 config.json."""
    file = read(raw, QwenFile, "config.json", CONFIG_HINT)
    return decoder_config("qwen2", file, qkv_bias=True, out_bias=False, layer_windows=_windows(file))


def qwen3_config(raw: Raw) -> ModelConfig:
    """ModelConfig of a Qwen 3 config.json."""
    file = read(raw, Qwen3File, "config.json", CONFIG_HINT)
    return decoder_config("qwen3", file, qk_norm=True, layer_windows=_windows(file))


def _windows(file: QwenFile) -> tuple[int | None, ...]:
    """Layers slide with use_sliding_window alone, from max_window_layers on."""
    layers, first = file.num_hidden_layers, file.max_window_layers
    upper = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    window = file.sliding_window if file.use_sliding_window else None
    return sliding_layers(file.layer_types or upper, window, layers)


class Qwen2(Llama):
    """Llama; its biases are data of its config."""

    read_config = staticmethod(qwen2_config)


class Qwen3(Llama):
    """Llama; its q/k norms are data of its config."""

    read_config = staticmethod(qwen3_config)
