"""Tiny random models of each kind that differs from a plain Llama, ready to chat with, written once a run.

Tokens are characters: any text of ASCII letters, digits and signs has ids, and is what its ids decode to.
"""

from __future__ import annotations

import functools
import json
import pathlib
import string

import golden_cases
import pytest
import tokenizers
import vision_cases

POSITIONS = 512
WIDE = {"max_position_embeddings": POSITIONS, "sliding_window": 40}  # some tokens of a sliding layer are packed
FAMILIES = {  # in the order of tests/test_families.py: what each is there for
    "gemma3": "sliding layers", "gemma2": "soft-capped scores, and sliding layers", "lfm2": "recurrent layers",
    "mixtral": "experts", "llava": "pictures",
}  # fmt: skip
OPTIONS = {"gemma3": {"layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"]}}
CHARACTERS = [c for c in string.printable[:-5] + "\n" if c not in "`^~|"]
NAMES = ["<unk>", "<s>", "</s>", *(c.translate({32: "Ġ", 10: "Ċ"}) for c in CHARACTERS)]
assert len(NAMES) == vision_cases.IMAGE_TOKEN == golden_cases.VOCAB - 1
TEMPLATE = """\
{{ bos_token }}{% for message in messages %}{{ message.role + ': ' + message.content | trim + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""


def write_tokenizer(folder: pathlib.Path) -> None:
    """Writes a tokenizer.json of characters, and tokenizer_config.json with the chat template."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE({name: i for i, name in enumerate(NAMES)}, []))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    library.add_special_tokens([*NAMES[:3], "<image>"])
    library.save(str(folder / "tokenizer.json"))
    declared = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(declared))


def write(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Writes the model of one of FAMILIES with POSITIONS, its tokenizer and its template, as a folder."""
    if name == "llava":
        vision_cases.write_model(folder)
        text = vision_cases.CONFIG["text_config"] | {"max_position_embeddings": POSITIONS}
        (folder / "config.json").write_text(json.dumps(vision_cases.CONFIG | {"text_config": text}))
    else:
        golden_cases.write_checkpoint(name, folder, **WIDE, **OPTIONS.get(name, {}))
    write_tokenizer(folder)
    return folder


@functools.cache
def _written(root: pathlib.Path, name: str) -> pathlib.Path:
    return write(name, root / f"tiny-{name}")


def tiny_model(name: str, factory: pytest.TempPathFactory) -> pathlib.Path:
    """Returns one of FAMILIES in the run's temporary folder, shared by all callers, which must not change it."""
    return _written(factory.getbasetemp(), name)
