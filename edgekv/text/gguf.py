"""Writes the tokenizer in a GGUF file's metadata as the files of a Hugging Face checkpoint.

Sources: llama.cpp's src/llama-vocab.cpp (regular expressions, end-of-generation tokens) and gguf-py.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from edgekv.errors import TokenizerError

Metadata = Mapping[str, Any]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # token types

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CAPITALS, SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{CAPITALS}*{SMALL}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{CAPITALS}+{SMALL}*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: dict[str, tuple[str, ...]] = {  # tokenizer.ggml.pre -> patterns that split a text, one after the other
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "granite-docling", "olmo"), (GPT2,)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe"), (LLAMA3,)),
    "dbrx": (LLAMA3,),  # OLMo 2, Phi-4, Granite 4
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (QWEN2,)),
    **dict.fromkeys(("smollm", "refact"), (r"\p{N}", GPT2)),  # refact: Granite 3
    "gpt-4o": (GPT4O,),  # Phi-4-mini
}
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3")
"""Values of tokenizer.ggml.pre with which words that are tokens are not merged, and texts begin with BOS."""
EOS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")


def write_tokenizer(metadata: Metadata, folder: pathlib.Path) -> None:
    """Writes tokenizer.model or tokenizer.json, tokenizer_config.json and generation_config.json.

    A file without a tokenizer writes none. Raises TokenizerError for one that is not supported.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind in (None, "no_vocab", "none"):
        return
    if kind not in WRITERS:
        raise TokenizerError(
            f"the GGUF file's tokenizer {kind!r} is not supported",
            accepted=WRITERS,
            advice="or give the model's own with {tokenizer:PATH}",
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    add_bos = WRITERS[kind](metadata, tokens, folder)
    config: dict[str, Any] = {"add_bos_token": add_bos}
    for name in ("bos", "eos"):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None and 0 <= token_id < len(tokens):
            config[f"{name}_token"] = tokens[token_id]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": _ends(metadata, tokens)}))


def _ends(metadata: Metadata, tokens: list[str]) -> list[int]:
    """Returns the ids that end a text, then those that end a turn: declared ones, and llama.cpp's by name."""
    declared = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    named = [i for i, token in enumerate(tokens) if token in EOS and types[i] in (CONTROL, USER_DEFINED)]
    return list(dict.fromkeys(i for i in (*declared, *named) if i is not None and 0 <= i < len(tokens)))


def _write_sentencepiece(metadata: Metadata, tokens: list[str], folder: pathlib.Path) -> bool:
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    ids = {name: int(metadata.get(f"tokenizer.ggml.{name}_token_id", -1)) for name in ("bos", "eos")}
    types, scores = metadata["tokenizer.ggml.token_type"], metadata["tokenizer.ggml.scores"]
    for i, (token, score, kind) in enumerate(zip(tokens, scores, types, strict=True)):
        readable = kind == CONTROL and i not in ids.values()  # as llama.cpp: written in a text, it is its id
        model.pieces.add(piece=token, score=score, type=USER_DEFINED if readable else kind)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.vocab_size, trainer.byte_fallback = trainer.BPE, len(tokens), True
    trainer.unk_id = types.index(UNKNOWN)
    trainer.bos_id, trainer.eos_id, trainer.pad_id = ids["bos"], ids["eos"], -1
    for name, i in (("unk", trainer.unk_id), *ids.items()):
        if i >= 0:
            setattr(trainer, f"{name}_piece", tokens[i])
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    normalizer.remove_extra_whitespaces = bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", False))
    normalizer.escape_whitespaces = True
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())
    return bool(metadata.get("tokenizer.ggml.add_bos_token", True))


def _write_byte_pairs(metadata: Metadata, tokens: list[str], folder: pathlib.Path) -> bool:
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    split = metadata.get("tokenizer.ggml.pre", "default")
    if split not in SPLITS:
        raise TokenizerError(
            f"the GGUF file cuts texts like {split!r}, which is not supported",
            accepted=SPLITS,
            advice="or give the model's own with {tokenizer:PATH}",
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split in WHOLE_WORDS))
    if SPLITS[split] == (QWEN2,):
        library.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in SPLITS[split]]
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    library.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    for token, kind in zip(tokens, types, strict=True):
        if kind in (CONTROL, USER_DEFINED):
            library.add_tokens([tokenizers.AddedToken(token, special=kind == CONTROL, normalized=False)])
    bos = int(metadata.get("tokenizer.ggml.bos_token_id", -1))
    add_bos = bos >= 0 and bool(metadata.get("tokenizer.ggml.add_bos_token", split in WHOLE_WORDS))
    if add_bos:
        begin = tokens[bos]
        library.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, bos)])
    library.save(str(folder / "tokenizer.json"))
    return add_bos


WRITERS: dict[str, Callable[[Metadata, list[str], pathlib.Path], bool]] = {
    "llama": _write_sentencepiece,
    "gpt2": _write_byte_pairs,
}
