"""Writes a Hugging Face folder as GGUF, the way llama.cpp's converter does, for the tests of reading it."""

import json
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import gguf
import golden_cases
import numpy as np
import sentencepiece

from edgekv.checkpoint.tensors import Tensors, to_float32
from edgekv.models import architecture, gguf_families
from edgekv.models.gguf import GgufNames
from edgekv.models.rope import frequencies

TYPES = gguf.GGMLQuantizationType
VALUES = gguf.GGUFValueType
KINDS = {bool: VALUES.BOOL, int: VALUES.UINT32, float: VALUES.FLOAT32, str: VALUES.STRING}


def write_gguf(
    folder: pathlib.Path,
    path: pathlib.Path,
    kind: str = "F32",
    *,
    tokenizer: bool = True,
    metadata: Mapping[str, Any] | None = None,
) -> pathlib.Path:
    """Writes the checkpoint with matrices of type ``kind`` and vectors in float32.

    metadata: of the architecture; None: what the config says under the family's keys.
    """
    config = json.loads((folder / "config.json").read_text())
    file = Tensors.open(folder / "model.safetensors")
    family, names = find_family(config), gguf_names(config)

    def fill(writer: gguf.GGUFWriter) -> None:
        if tokenizer:
            write_tokenizer(writer, folder)
        stacked: dict[Any, dict[str, Any]] = {}
        for name in file:
            target = names[name.removeprefix("transformer.")]
            array = _reordered(target, to_float32(file[name].read()), config)
            if array.ndim == 1 and target.endswith("norm.weight"):
                array = array + np.float32(family.norm_offset)
            chosen = TYPES.F32 if array.ndim == 1 or target == "position_embd.weight" else TYPES[kind]
            array = gguf.quants.quantize(np.ascontiguousarray(array), chosen)
            stacked.setdefault(chosen, {}).setdefault(target, []).append((_expert(name), array))
        for each, tensors in stacked.items():
            _add(writer, tensors, each)
        for name, factors in _rope_factors(config).items():
            writer.add_tensor(name, np.array(factors, np.float32))

    return _write(path, family.architecture, metadata or own_metadata(config), fill)


def _write(
    path: pathlib.Path, architecture: str, metadata: Mapping[str, Any], fill: Callable[[gguf.GGUFWriter], None]
) -> pathlib.Path:
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in metadata.items():
        writer.add_key_value(key, value, KINDS[type(value)])
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def find_family(config: dict[str, Any]) -> GgufNames:
    return next(each for each in gguf_families().values() if each.model_type == config["model_type"])


def gguf_names(config: dict[str, Any]) -> dict[str, str]:
    """Returns the GGUF name of each of the checkpoint's tensors."""
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    return {
        f"{theirs.format(i=i, e=e)}.{end}": f"{ours.format(i=i)}.{end}"
        for ours, theirs in find_family(config).names.items()
        for i in range(layers if "{i}" in ours else 1)
        for e in range(config["num_experts"] if "{e}" in theirs else 1)
        for end in ("weight", "bias")
    }


def _add(writer: gguf.GGUFWriter, tensors: Mapping[str, list[tuple[int, np.ndarray]]], kind: Any) -> None:
    """Adds tensors, or what there is of each expert, with its number, as one."""
    for name, parts in tensors.items():
        arrays = [array for _, array in sorted(parts, key=lambda part: part[0])]
        writer.add_tensor(name, np.stack(arrays) if "_exps" in name else arrays[0], raw_dtype=kind)


def _expert(name: str) -> int:
    found = re.search(r"\.experts\.(\d+)\.", name)
    return int(found[1]) if found else 0


def own_metadata(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config's entries under the family's keys."""
    family, scaling = find_family(config), config.get("rope_scaling") or {}
    found = {key: config[entry] for entry, key in family.keys.items() if config.get(entry) is not None}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": scaling["factor"]}
    if kind == "yarn":
        found["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
    return {f"{family.architecture}.{key}": value for key, value in found.items()}


def _reordered(name: str, array: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    role, family = name.split(".")[-2], find_family(config)
    if role in family.conv1d and array.ndim == 2:
        return array.T
    if role in family.interleaved:
        key = "num_attention_heads" if role == "attn_q" else "num_key_value_heads"
        heads = config.get(key, config["num_attention_heads"])
        halves = array.reshape(heads, 2, len(array) // heads // 2, *array.shape[1:])
        return halves.swapaxes(1, 2).reshape(array.shape)
    return array


def _rope_factors(config: dict[str, Any]) -> dict[str, Any]:
    """Returns what each frequency is divided by, for longrope and for Llama 3.1's scaling."""
    scaling = config.get("rope_scaling") or {}
    if config["model_type"] == "phi3" and scaling:
        return {f"rope_factors_{side}.weight": scaling[f"{side}_factor"] for side in ("long", "short")}
    if scaling.get("rope_type") != "llama3":
        return {}
    plain, scaled = (
        frequencies(architecture(config | {"rope_scaling": each}).config.ropes[0], 1)[0]
        for each in (None, scaling)
    )
    return {"rope_freqs.weight": plain / scaled}


def write_tokenizer(writer: gguf.GGUFWriter, folder: pathlib.Path) -> None:
    """Writes the tokenizer that lies in the folder, if there is one."""
    if (folder / "tokenizer.model").exists():
        _write_sentencepiece(writer, folder / "tokenizer.model")
    elif (folder / "vocab.json").exists():
        _write_byte_pairs(writer, folder)
    template = folder / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text())


def write_vocabulary(folder: pathlib.Path, fill: Callable[[gguf.GGUFWriter], None]) -> pathlib.Path:
    """Writes a file with what ``fill`` writes, such as a tokenizer, and next to no model."""

    def fill_all(writer: gguf.GGUFWriter) -> None:
        fill(writer)
        writer.add_tensor("token_embd.weight", np.zeros((96, 64), np.float32))

    return _write(folder / "vocabulary.gguf", "llama", own_metadata(golden_cases.LLAMA), fill_all)


def _write_sentencepiece(writer: gguf.GGUFWriter, path: pathlib.Path) -> None:
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ids = range(library.vocab_size())
    tests = {2: library.is_unknown, 3: library.is_control, 5: library.is_unused, 6: library.is_byte}
    writer.add_tokenizer_model("llama")
    writer.add_token_list([library.id_to_piece(i) for i in ids])
    writer.add_token_scores([library.get_score(i) for i in ids])
    writer.add_token_types([next((kind for kind, test in tests.items() if test(i)), 1) for i in ids])
    writer.add_bos_token_id(library.bos_id())
    writer.add_eos_token_id(library.eos_id())


def _write_byte_pairs(writer: gguf.GGUFWriter, folder: pathlib.Path) -> None:
    vocabulary = json.loads((folder / "vocab.json").read_text())
    end, merges = vocabulary["<|endoftext|>"], (folder / "merges.txt").read_text().splitlines()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    writer.add_token_types([3 if i == end else 1 for i in range(len(vocabulary))])
    writer.add_token_merges([line for line in merges if line and not line.startswith("#version")])
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)


K_BLOCK = 256
HALVES = {"Q4_0": [0], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q2_K": [-4, -2], "Q3_K": [-2]}
HALVES |= {"Q6_K": [-2], "IQ4_XS": [0], "IQ4_NL": [0], "IQ3_S": [0], "F16": [0]}  # where scale and least are
STEPS = {"Q3_K": 1e-3, "Q6_K": 1e-4, "IQ4_XS": 1e-4, "IQ3_S": 5e-4}  # scales; of others 2e-3


def set_halves(raw: np.ndarray, kind: str, halves: Any) -> np.ndarray:
    """Sets the half floats of blocks (..., bytes) to numbers that fit (..., 1)."""
    for start in (start % raw.shape[-1] for start in HALVES[kind]):
        raw[..., start : start + 2] = (
            np.broadcast_to(np.float16(halves), (*raw.shape[:-1], 1)).copy().view(np.uint8)
        )
    return raw


def write_k_quants(
    folder: pathlib.Path,
    kind: str,
    others: Mapping[str, str] | None = None,
    model: Mapping[str, Any] = golden_cases.LLAMA,
) -> tuple[pathlib.Path, np.ndarray]:
    """A model of one layer with random blocks: gguf can read K-quants, not make them. Also 0.down's weights.

    others: types of other projections, by the end of their names.
    """
    config = {**model, "hidden_size": K_BLOCK, "intermediate_size": K_BLOCK, "num_hidden_layers": 1}
    rng, names, found = np.random.default_rng(0), gguf_names(config), dict[str, np.ndarray]()

    def fill(writer: gguf.GGUFWriter) -> None:
        stacked: dict[Any, dict[str, Any]] = {}
        for tensor, shape in architecture(config).tensors().items():
            if len(shape) == 1:
                writer.add_tensor(names[tensor], np.ones(shape, np.float32))
                continue
            own = next((other for end, other in (others or {}).items() if f"{end}.weight" in tensor), kind)
            block, size = gguf.GGML_QUANT_SIZES[TYPES[own]]
            raw = rng.integers(0, 256, (shape[0], shape[1] // block, size), np.uint8)
            raw = set_halves(raw, own, STEPS.get(own, 2e-3)).reshape(shape[0], -1)
            stacked.setdefault(TYPES[own], {}).setdefault(names[tensor], []).append((_expert(tensor), raw))
            found[tensor.split(".")[-2]] = gguf.quants.dequantize(raw, TYPES[own])

        for each, tensors in stacked.items():
            _add(writer, tensors, each)

    path = _write(folder / "k.gguf", find_family(config).architecture, own_metadata(config), fill)
    return path, found["down_proj"]
