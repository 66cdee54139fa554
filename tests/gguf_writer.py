"""Writes a Hugging Face folder as GGUF, the way llama.cpp's converter does, for the tests of reading it."""

import json
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import gguf
import golden_cases
import numpy as np
import sentencepiece

from edgekv.checkpoint.tensors import Tensors, to_float32
from edgekv.models import architecture, gguf_families
from edgekv.models.gguf import GgufNames

TYPES = gguf.GGMLQuantizationType


def write_gguf(
    folder: pathlib.Path, path: pathlib.Path, kind: str = "F32", *, head: str | None = None, tokenizer: bool = True
) -> pathlib.Path:
    """Matrices of type ``kind`` (the output projection of type ``head``), vectors in float32."""
    config = json.loads((folder / "config.json").read_text())
    file = Tensors.open(folder / "model.safetensors")
    tensors = {name: to_float32(file[name].read()) for name in file}
    architecture, family = find_architecture(config)
    writer = gguf.GGUFWriter(str(path), architecture)
    _write_config(writer, config)
    if tokenizer:
        write_tokenizer(writer, folder)
    names = gguf_names(config)
    for name, array in tensors.items():
        target = names[name.removeprefix("transformer.")]
        array = _reordered(target, array, config)
        if array.ndim == 1 and target.endswith("norm.weight"):
            array = array + np.float32(family.norm_offset)
        if array.ndim == 1 or target == "position_embd.weight":
            writer.add_tensor(target, array)
            continue
        chosen = TYPES[(head if head and target == "output.weight" else kind)]
        writer.add_tensor(target, gguf.quants.quantize(np.ascontiguousarray(array), chosen), raw_dtype=chosen)
    for name, factors in _rope_factors(config).items():
        writer.add_tensor(name, np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def find_architecture(config: dict[str, Any]) -> tuple[str, GgufNames]:
    """llama.cpp's name of the family, and how we read it."""
    return next((name, each) for name, each in gguf_families().items() if each.model_type == config["model_type"])


def gguf_names(config: dict[str, Any]) -> dict[str, str]:
    """Checkpoint tensor -> GGUF tensor."""
    family = find_architecture(config)[1]
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    names = {}
    for ours, theirs in family.names.items():
        for i in range(layers if "{i}" in ours else 1):
            for end in ("weight", "bias"):
                names[f"{theirs.format(i=i)}.{end}"] = f"{ours.format(i=i)}.{end}"
    return names


def _reordered(name: str, array: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    role, family = name.split(".")[-2], find_architecture(config)[1]
    if role in family.conv1d and array.ndim == 2:
        return array.T
    if role in family.interleaved:
        key = "num_attention_heads" if role == "attn_q" else "num_key_value_heads"
        heads = config.get(key, config["num_attention_heads"])
        halves = array.reshape(heads, 2, len(array) // heads // 2, *array.shape[1:])
        return halves.swapaxes(1, 2).reshape(array.shape)
    return array


def _write_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    if config["model_type"] == "gpt2":
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(config["n_embd"])
        writer.add_block_count(config["n_layer"])
        writer.add_feed_forward_length(config.get("n_inner") or 4 * config["n_embd"])
        writer.add_head_count(config["n_head"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    heads, kind = config["num_attention_heads"], config["model_type"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if kind != "gemma2":
        writer.add_rope_freq_base(config.get("rope_theta", 1e6))
    if kind in ("llama", "smollm3", "granite"):
        writer.add_rope_dimension_count(head_dim)
    if kind == "llama" or kind.startswith("gemma") or "head_dim" in config:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    OWN.get(kind, _llama)(writer, config)


def _llama(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


def _gemma(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    _llama(writer, config)
    writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] == "gemma3_text":
        writer.add_rope_freq_base_swa(config.get("rope_local_base_freq", 10000.0))
    if "attn_logit_softcapping" in config:
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if "final_logit_softcapping" in config:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _phi3(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    positions, original = config["max_position_embeddings"], config.get("original_max_position_embeddings", 4096)
    heads = config["num_attention_heads"]
    writer.add_rope_dimension_count(int(config.get("partial_rotary_factor", 1.0) * config["hidden_size"]) // heads)
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_sliding_window(config.get("sliding_window", 0))
    if config.get("rope_scaling"):
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(positions / original) / math.log(original)))


def _granite(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_attention_scale(config.get("attention_multiplier", 1.0))
    writer.add_embedding_scale(config.get("embedding_multiplier", 1.0))
    writer.add_residual_scale(config.get("residual_multiplier", 1.0))
    writer.add_logit_scale(config.get("logits_scaling", 1.0))


OWN = {"gemma2": _gemma, "gemma3_text": _gemma, "phi3": _phi3, "granite": _granite}
"""What a family has beside Llama's keys, by its model_type."""


def _rope_factors(config: dict[str, Any]) -> dict[str, Any]:
    """Longrope's sets, and Llama 3.1's scaling as the converter writes it: what each frequency is divided by."""
    scaling = config.get("rope_scaling") or {}
    if config["model_type"] == "phi3" and scaling:
        return {f"rope_factors_{side}.weight": scaling[f"{side}_factor"] for side in ("long", "short")}
    if scaling.get("rope_type") != "llama3":
        return {}
    dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    frequencies = config["rope_theta"] ** -(np.arange(0, dim, 2) / dim)
    original = scaling["original_max_position_embeddings"]
    low, high = original / scaling["low_freq_factor"], original / scaling["high_freq_factor"]
    factors = []
    for wavelength in 2 * np.pi / frequencies:
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(scaling["factor"])
        else:
            span = scaling["high_freq_factor"] - scaling["low_freq_factor"]
            smooth = (original / wavelength - scaling["low_freq_factor"]) / span
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return {"rope_freqs.weight": factors}


def write_tokenizer(writer: gguf.GGUFWriter, folder: pathlib.Path) -> None:
    """The tokenizer that lies in the folder, if there is one."""
    if (folder / "tokenizer.model").exists():
        _write_sentencepiece(writer, folder / "tokenizer.model")
    elif (folder / "vocab.json").exists():
        _write_byte_pairs(writer, folder)
    template = folder / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text())


def write_vocabulary(folder: pathlib.Path, fill: Callable[[gguf.GGUFWriter], None]) -> pathlib.Path:
    """A file with what ``fill`` writes, such as a tokenizer, and next to no model."""
    path = folder / "vocabulary.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    _write_config(writer, golden_cases.LLAMA)
    fill(writer)
    writer.add_tensor("token_embd.weight", np.zeros((96, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_sentencepiece(writer: gguf.GGUFWriter, path: pathlib.Path) -> None:
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ids = range(library.vocab_size())
    tests = {2: library.is_unknown, 3: library.is_control, 5: library.is_unused, 6: library.is_byte}
    types = [next((kind for kind, test in tests.items() if test(i)), 1) for i in ids]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([library.id_to_piece(i) for i in ids])
    writer.add_token_scores([library.get_score(i) for i in ids])
    writer.add_token_types(types)
    writer.add_bos_token_id(library.bos_id())
    writer.add_eos_token_id(library.eos_id())


def _write_byte_pairs(writer: gguf.GGUFWriter, folder: pathlib.Path) -> None:
    vocabulary = json.loads((folder / "vocab.json").read_text())
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    end = vocabulary["<|endoftext|>"]
    merges = (folder / "merges.txt").read_text().splitlines()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i == end else 1 for i in range(len(tokens))])
    writer.add_token_merges([line for line in merges if line and not line.startswith("#version")])
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)


K_BLOCK = 256
HALVES = {"Q4_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [-2]}  # where scale and least are


def write_k_quants(
    folder: pathlib.Path, kind: str, others: Mapping[str, str] | None = None
) -> tuple[pathlib.Path, np.ndarray]:
    """A model of one layer with random blocks: gguf can read K-quants, not make them. Also 0.down's weights.

    others: types of other projections, by the end of their names.
    """
    config = golden_cases.LLAMA | {"hidden_size": K_BLOCK, "intermediate_size": K_BLOCK, "num_hidden_layers": 1}
    writer, rng = gguf.GGUFWriter(str(folder / "k.gguf"), "llama"), np.random.default_rng(0)
    _write_config(writer, config)
    names = gguf_names(config)
    for tensor, shape in architecture(config).tensors().items():
        if len(shape) == 1:
            writer.add_tensor(names[tensor], np.ones(shape, np.float32))
            continue
        own = next((other for end, other in (others or {}).items() if f"{end}.weight" in tensor), kind)
        chosen = gguf.GGMLQuantizationType[own]
        block, size = gguf.GGML_QUANT_SIZES[chosen]
        raw = rng.integers(0, 256, (shape[0], shape[1] // block, size), np.uint8)
        for start in HALVES[own]:
            scale = np.full((*raw.shape[:2], 1), 1e-4 if own == "Q6_K" else 2e-3, np.float16)
            raw[..., start % size : start % size + 2] = scale.view(np.uint8)
        raw = raw.reshape(shape[0], -1)
        writer.add_tensor(names[tensor], raw, raw_dtype=chosen)
        if tensor.endswith("down_proj.weight"):
            down = gguf.quants.dequantize(raw, chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "k.gguf", down
