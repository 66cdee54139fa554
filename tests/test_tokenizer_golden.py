"""Tokenizers of published models against golden ids."""

import json
import pathlib

import pytest
from tokenizer_cases import stream

from edgekv.text import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def real(shared: pathlib.Path) -> dict[str, Tokenizer]:
    return {
        "llama2": load_tokenizer(shared / "tokenizers/llama2"),
        "llama2_hf": load_tokenizer(shared / "tokenizers/llama2_hf"),
        "gpt2": load_tokenizer(shared / "models/gpt2-60m"),
        "stories260K": load_tokenizer(shared / "models/stories260K"),
    }


def read_cases(folder: pathlib.Path) -> list[tuple[str, list[int]]]:
    """llama.cpp's files: texts between separator lines, ids without BOS; the last pair is the empty text."""
    texts = (folder / "cases.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = (folder / "cases.out").read_text().split("\n")
    return [(text, [int(i) for i in line.split()]) for text, line in zip(texts, lines, strict=True)]


@pytest.mark.parametrize("index", range(47))
@pytest.mark.parametrize(("name", "cases"), [("llama2", "llama2"), ("llama2_hf", "llama2"), ("gpt2", "gpt2")])
def test_golden_ids(shared: pathlib.Path, real: dict[str, Tokenizer], name: str, cases: str, index: int) -> None:
    text, ids = read_cases(shared / "tokenizers" / cases)[index]
    tokenizer = real[name]
    start = [] if name == "gpt2" else [1]
    assert tokenizer.encode(text, bos=False) == ids
    assert tokenizer.encode(text) == start + ids
    assert tokenizer.decode(start + ids) == text
    assert stream(tokenizer, start + ids)[-1] == text


def test_all_golden_cases_are_counted(shared: pathlib.Path) -> None:
    assert [len(read_cases(shared / "tokenizers" / name)) for name in ("llama2", "gpt2")] == [47, 47]


def test_golden_story_decodes(shared: pathlib.Path, real: dict[str, Tokenizer]) -> None:
    golden = json.loads((shared / "golden/stories260K_greedy200.json").read_text())
    tokenizer = real["stories260K"]
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (512, 1, (2,))
    assert tokenizer.decode(golden["token_ids"]) == golden["expected_text"]
    assert tokenizer.encode("Once upon a time") == golden["token_ids"][:5]


@pytest.mark.parametrize(
    ("name", "vocab_size", "bos_id", "eos_ids"),
    [("llama2", 32000, 1, (2,)), ("llama2_hf", 32045, None, ()), ("gpt2", 50257, 50256, (50256,))],
)
def test_real_special_tokens(
    real: dict[str, Tokenizer], name: str, vocab_size: int, bos_id: int | None, eos_ids: tuple[int, ...]
) -> None:
    tokenizer = real[name]
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (vocab_size, bos_id, eos_ids)
