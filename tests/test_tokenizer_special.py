"""Special tokens: what is added, what ends a text, and which file says so."""

import pathlib
import shutil
from collections.abc import Callable

import pytest
import sentencepiece
from tokenizer_cases import make_folders, write_json

from edgekv.text import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    return make_folders(tmp_path_factory)


@pytest.fixture(scope="module")
def small(folders: dict[str, pathlib.Path]) -> dict[str, Tokenizer]:
    return {name: load_tokenizer(folder) for name, folder in folders.items()}


@pytest.fixture
def copy(folders: dict[str, pathlib.Path], tmp_path: pathlib.Path) -> Callable[[str], pathlib.Path]:
    """A private copy of a small tokenizer's folder, to damage or to add to."""
    return lambda name: pathlib.Path(shutil.copytree(folders[name], tmp_path / "model"))


def test_bos_is_added_where_the_format_does(small: dict[str, Tokenizer]) -> None:
    for name, bos_id in {"sentencepiece": 1, "spaced json": 1}.items():
        assert small[name].encode("the") == [bos_id, *small[name].encode("the", bos=False)], name
    for name in ("byte-level json", "gpt2"):
        assert small[name].encode("the") == small[name].encode("the", bos=False), name


def test_add_bos_token_false(copy: Callable[[str], pathlib.Path]) -> None:
    tokenizer = load_tokenizer(write_json(copy("sentencepiece"), tokenizer_config={"add_bos_token": False}))
    assert tokenizer.bos_id is not None
    assert tokenizer.encode("the") == tokenizer.encode("the", bos=False)


def test_add_bos_token_true(copy: Callable[[str], pathlib.Path]) -> None:
    tokenizer = load_tokenizer(write_json(copy("gpt2"), tokenizer_config={"add_bos_token": True}))
    assert tokenizer.encode("the") == [tokenizer.bos_id, *tokenizer.encode("the", bos=False)]


@pytest.mark.parametrize(
    ("name", "token"),
    [("spaced json", "<|end|>"), ("byte-level json", "<|endoftext|>"), ("gpt2", "<|endoftext|>")],
)
def test_special_tokens_in_text(small: dict[str, Tokenizer], name: str, token: str) -> None:
    ids = small[name].encode(f"the{token}", bos=False)
    assert small[name].token_bytes(ids[-1]) == b""
    assert small[name].decode(ids) == "the"


def test_sentencepiece_control_symbols_are_plain_text(small: dict[str, Tokenizer]) -> None:
    tokenizer = small["sentencepiece"]
    assert tokenizer.decode(tokenizer.encode("the</s>", bos=False)) == "the</s>"
    assert [tokenizer.token_bytes(token_id) for token_id in range(3)] == [" ⁇ ".encode(), b"", b""]


def test_added_tokens_that_are_not_special_are_text(small: dict[str, Tokenizer]) -> None:
    tokenizer = small["byte-level json"]
    ids = tokenizer.encode("<tool call>the")
    assert ids[0] == tokenizer.vocab_size - 1
    assert tokenizer.decode(ids) == "<tool call>the"


def test_an_added_token_that_ends_a_text_has_none(copy: Callable[[str], pathlib.Path]) -> None:
    folder = write_json(copy("byte-level json"), tokenizer_config={"eos_token": "<tool call>"})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_ids == (tokenizer.vocab_size - 1,)
    assert tokenizer.decode(tokenizer.encode("the<tool call>")) == "the"


def test_truncation_and_padding_of_a_tokenizer_json_are_off(small: dict[str, Tokenizer]) -> None:
    assert len(small["byte-level json"].encode("zzzzzzzz")) == 8
    assert len(small["byte-level json"].encode("z")) == 1


@pytest.mark.parametrize(
    ("files", "eos_ids"),
    [
        ({}, (2,)),
        ({"special_tokens_map": {"eos_token": {"content": "<s>"}}}, (1,)),
        ({"special_tokens_map": {"eos_token": "<s>"}, "tokenizer_config": {"eos_token": "▁"}}, (260,)),
        ({"tokenizer_config": {"eos_token": "<s>"}, "config": {"eos_token_id": 5}}, (5,)),
        ({"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": [7, 6]}}, (7, 6)),
        ({"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": None}}, (5,)),
        ({"config": {"eos_token_id": [400, 2], "vocab_size": 401}}, (400, 2)),
    ],
)
def test_eos_is_taken_from_the_first_that_says(
    copy: Callable[[str], pathlib.Path], files: dict[str, object], eos_ids: tuple[int, ...]
) -> None:
    folder = write_json(copy("sentencepiece"), **files)
    space = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model")).piece_to_id("▁")
    expected = tuple(space if token_id == 260 else token_id for token_id in eos_ids)
    assert load_tokenizer(folder).eos_ids == expected


def test_bos_of_the_tokenizer_goes_before_the_config(copy: Callable[[str], pathlib.Path]) -> None:
    folder = write_json(copy("sentencepiece"), config={"bos_token_id": 0, "eos_token_id": 2})
    assert load_tokenizer(folder).bos_id == 1


def test_a_tokenizer_json_learns_its_bos_from_the_files_beside_it(copy: Callable[[str], pathlib.Path]) -> None:
    folder = write_json(copy("spaced json"), generation_config={"bos_token_id": 2, "eos_token_id": 262})
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (2, (262,))
    write_json(folder, tokenizer_config={"bos_token": {"content": "<s>"}})
    assert load_tokenizer(folder).bos_id == 1
