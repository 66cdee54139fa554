"""Tokenizers of GGUF files: the same ids as the files they were made from, special tokens, chat templates."""

import itertools
import pathlib

import gguf
import gguf_writer
import pytest
import tokenizers

from edgekv.checkpoint.gguf import imported
from edgekv.text import load_tokenizer
from edgekv.text.template import find_template

TEXTS = ["Hello world", "  two  spaces ", "naïve 🦙 中文\n\ttab", "12345 don't I'LL", "<s> a </s>", ""]


def test_a_sentencepiece_tokenizer(shared: pathlib.Path, tmp_path: pathlib.Path) -> None:
    source = shared / "tokenizers" / "llama2"
    folder = imported(tokenizer_only(source, tmp_path))[0]
    ours, theirs = load_tokenizer(folder), load_tokenizer(source)
    assert (ours.bos_id, ours.eos_ids) == (theirs.bos_id, theirs.eos_ids)
    cases = (source / "cases.inp").read_text().split("\n__ggml_vocab_test__\n")
    for text in [*cases, *TEXTS]:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)


def test_a_byte_pair_tokenizer(shared: pathlib.Path, tmp_path: pathlib.Path) -> None:
    source = shared / "models" / "gpt2-60m"
    folder = imported(tokenizer_only(source, tmp_path))[0]
    ours, theirs = load_tokenizer(folder), load_tokenizer(source)
    assert ours.eos_ids == theirs.eos_ids
    cases = (shared / "tokenizers" / "gpt2" / "cases.inp").read_text().split("\n__ggml_vocab_test__\n")
    for text in [*cases, *TEXTS, "a<|endoftext|>b"]:
        assert ours.encode(text) == theirs.encode(text)


@pytest.mark.parametrize(
    ("split", "cuts"),
    [
        ("gpt-4o", ["camel", "Case's", " x", "123", "45", "//\n", " Ünï"]),
        ("dbrx", ["camelCase", "'s", " x", "123", "45", "//\n", " Ünï"]),
        ("refact", ["camelCase", "'s", " x", "1", "2", "3", "4", "5", "//", "\n", " Ünï"]),
        ("olmo", ["camelCase", "'s", " x", "12345", "//", "\n", " Ünï"]),
        ("default", ["camelCase", "'", "s", " x", "123", "45", "//", "\n", " Ünï"]),
    ],
)
def test_how_texts_are_cut(split: str, cuts: list[str], tmp_path: pathlib.Path) -> None:
    """Before byte pairs are merged. llama.cpp's tokens of 50 texts were the same for every entry of SPLITS."""
    tokens = [*(chr(i) for i in (*range(33, 127), *range(161, 324))), "ab"]

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(split)
        writer.add_token_list(tokens)
        writer.add_token_types([1] * len(tokens))
        writer.add_token_merges(["a b"])

    folder, _ = imported(gguf_writer.write_vocabulary(tmp_path, fill))
    found = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).pre_tokenizer.pre_tokenize_str(
        "".join(cuts)
    )
    ends = list(itertools.accumulate(map(len, cuts)))
    assert [span for _, span in found] == list(zip([0, *ends], ends, strict=False))


def tokenizer_only(source: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """A GGUF file with a tokenizer and next to no model."""
    return gguf_writer.write_vocabulary(folder, lambda writer: gguf_writer.write_tokenizer(writer, source))


def test_special_tokens_and_the_chat_template(tmp_path: pathlib.Path) -> None:
    """Control tokens but begin and end can be written in a text, and end an answer if their name says so."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "▁",
        "a",
        "<|im_start|>",
        "<|im_end|>",
    ]

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * len(tokens))
        writer.add_token_types([2, 3, 3, *[6] * 256, 1, 1, 3, 3])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template("{{ messages }}")

    path = gguf_writer.write_vocabulary(tmp_path, fill)
    folder, _ = imported(path)
    tokenizer = load_tokenizer(folder)
    n = len(tokens)
    assert tokenizer.eos_ids == (2, n - 1)
    assert tokenizer.encode("a<|im_end|>", bos=False)[-2:] == [n - 3, n - 1]
    assert find_template(folder) == "{{ messages }}"
