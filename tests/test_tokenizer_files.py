"""Which files a tokenizer is read from; missing and damaged ones."""

import json
import pathlib
import shutil
from collections.abc import Callable

import pytest
import tokenizers
from tokenizer_cases import BPE, make_folders, make_spaced_json, write_json

from edgekv.errors import TokenizerError
from edgekv.text import load_tokenizer
from edgekv.text.formats import FILES


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    return make_folders(tmp_path_factory)


@pytest.fixture
def copy(folders: dict[str, pathlib.Path], tmp_path: pathlib.Path) -> Callable[[str], pathlib.Path]:
    """A private copy of a small tokenizer's folder, to damage or to add to."""
    return lambda name: pathlib.Path(shutil.copytree(folders[name], tmp_path / "model"))


def test_tokenizer_apart_from_the_model(folders: dict[str, pathlib.Path], tmp_path: pathlib.Path) -> None:
    model = write_json(tmp_path, config={"eos_token_id": 5}, generation_config={"eos_token_id": 6})
    file = folders["sentencepiece"] / "tokenizer.model"
    assert load_tokenizer(file, model_folder=model).eos_ids == (6,)
    assert load_tokenizer(file, config={"eos_token_id": 7}).eos_ids == (7,)
    gpt2 = folders["gpt2"]
    assert load_tokenizer(gpt2 / "vocab.json").encode("the") == load_tokenizer(gpt2).encode("the")


def test_tokenizer_json_is_preferred(copy: Callable[[str], pathlib.Path]) -> None:
    folder = copy("sentencepiece")
    assert load_tokenizer(folder).vocab_size == 320
    make_spaced_json(folder)
    assert load_tokenizer(folder).encode("a<|end|>")[-1] == load_tokenizer(folder).vocab_size - 1


# Missing and damaged files


def refused(folder: pathlib.Path, *words: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(folder)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_no_tokenizer(tmp_path: pathlib.Path) -> None:
    refused(
        tmp_path, str(tmp_path), "tokenizer.json", "tokenizer.model", "vocab.json and merges.txt", "tokenizer=PATH"
    )
    refused(tmp_path / "missing", "missing", "tokenizer=PATH")


@pytest.mark.parametrize("content", [b"", b"garbage", b"version https://git-lfs.github.com/spec/v1\noid sha256"])
def test_a_tokenizer_model_that_is_none(tmp_path: pathlib.Path, content: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    refused(tmp_path, "tokenizer.model", "copy it again")


@pytest.mark.parametrize("name", ["sentencepiece", "spaced json", "gpt2"])
def test_a_truncated_file(copy: Callable[[str], pathlib.Path], name: str) -> None:
    folder = copy(name)
    file = next(folder / file for file in FILES if (folder / file).exists())
    file.write_bytes(file.read_bytes()[:-3])
    refused(folder, file.name, "copy")


def test_llama3s_own_format_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    refused(tmp_path, "tokenizer.model", "Llama 3's own format", "tokenizer.json")


def test_gpt2_without_merges_or_end(copy: Callable[[str], pathlib.Path]) -> None:
    folder = copy("gpt2")
    vocab = json.loads((folder / "vocab.json").read_text())
    write_json(folder, vocab={piece: i for piece, i in vocab.items() if piece != "<|endoftext|>"})
    refused(folder, "<|endoftext|>", "tokenizer.json")
    (folder / "merges.txt").unlink()
    refused(folder, "merges.txt", "vocab.json")


REPLACED = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
SEQUENCE = {"Sequence": {"id": "A", "type_id": 0}}


@pytest.mark.parametrize(
    ("part", "value", "word"),
    [
        ("normalizer", {"type": "Sequence", "normalizers": [REPLACED] * 3}, "1,000,000,000 times longer"),
        (
            "post_processor",
            {"type": "TemplateProcessing", "single": [SEQUENCE] * 9999, "pair": [], "special_tokens": {}},
            "9,999 times longer",
        ),
        (
            "normalizer",
            {"type": "Precompiled", "precompiled_charsmap": "/////w=="},
            "precompiled_charsmap is damaged",
        ),
    ],
    ids=["replaced", "template", "table"],
)
def test_pipelines_that_take_all_memory(
    copy: Callable[[str], pathlib.Path], part: str, value: object, word: str
) -> None:
    """The library ended the process."""
    folder = copy("sentencepiece")
    make_spaced_json(folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {part: value}))
    refused(folder, "tokenizer.json", word)


@pytest.mark.parametrize("decoder", [None, tokenizers.decoders.WordPiece()])
def test_a_decoder_of_another_kind(tmp_path: pathlib.Path, decoder: object) -> None:
    library = tokenizers.Tokenizer(BPE({"a": 0}, []))
    if decoder is not None:
        library.decoder = decoder
    library.save(str(tmp_path / "tokenizer.json"))
    refused(tmp_path, "tokenizer.json", "decoder of type", "ByteLevel")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config": {"eos_token_id": 320}}, ["eos_token_id 320", "320 tokens"]),
        ({"config": {"eos_token_id": 400, "vocab_size": 400}}, ["eos_token_id 400", "400 tokens"]),
        ({"generation_config": {"eos_token_id": [2, -1]}}, ["eos_token_id -1"]),
        ({"config": {"eos_token_id": "</s>"}}, ["eos_token_id is '</s>'"]),
        ({"config": {"eos_token_id": [True]}}, ["eos_token_id is [True]"]),
        ({"tokenizer_config": {"bos_token": "<nope>"}}, ["bos_token '<nope>'", "tokenizer_config.json"]),
        ({"tokenizer_config": {"eos_token": 2}}, ["eos_token is 2"]),
        ({"special_tokens_map": ["</s>"]}, ["special_tokens_map.json", "list"]),
    ],
)
def test_contradictions(copy: Callable[[str], pathlib.Path], files: dict[str, object], words: list[str]) -> None:
    refused(write_json(copy("sentencepiece"), **files), *words)


def test_a_damaged_settings_file(copy: Callable[[str], pathlib.Path]) -> None:
    folder = copy("sentencepiece")
    (folder / "tokenizer_config.json").write_text('{"bos_token": ')
    refused(folder, "tokenizer_config.json", "is not valid JSON")
