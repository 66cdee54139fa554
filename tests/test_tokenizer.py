"""Tokenizers of every format: golden ids, text and back, special tokens, files that are missing or damaged."""

import itertools
import json
import pathlib
import random
import re
import shutil
from collections.abc import Callable

import gguf
import gguf_writer
import pytest
import sentencepiece
import tokenizers
from helpers import raises
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizer_cases import BPE, FORMATS, make_folders, make_sentencepiece, stream, write_json

from edgekv.checkpoint.gguf import import_gguf
from edgekv.errors import TokenizerError
from edgekv.text import Tokenizer, load_tokenizer
from edgekv.text.formats import read_pieces
from edgekv.text.template import find_template

PIECES = [" ", "  ", "the", " cat", "\n", "é", "🦙", "👩‍👩‍👧", "中文", "\0", "<0x41>", "<tool call>"]
SPECIAL = re.compile(r"</?s>|<unk>|<\|")
TEXTS = (
    st.text(st.characters(exclude_categories=["Cs"])) | st.lists(st.sampled_from(PIECES)).map("".join)
).filter(lambda text: not SPECIAL.search(text))
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    return make_folders(tmp_path_factory)


@pytest.fixture(scope="module")
def small(folders: dict[str, pathlib.Path]) -> dict[str, Tokenizer]:
    return {name: load_tokenizer(folder) for name, folder in folders.items()}


@pytest.fixture
def copy(folders: dict[str, pathlib.Path], tmp_path: pathlib.Path) -> Callable[[str], pathlib.Path]:
    """A private copy of a small tokenizer's folder, to damage or to add to."""
    numbers = itertools.count()
    return lambda name: pathlib.Path(shutil.copytree(folders[name], tmp_path / f"model{next(numbers)}"))


def read_cases(folder: pathlib.Path) -> list[tuple[str, list[int]]]:
    """Reads llama.cpp's files: texts between separator lines, ids without BOS; the last pair is the empty text."""
    texts = (folder / "cases.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = (folder / "cases.out").read_text().split("\n")
    return [(text, [int(i) for i in line.split()]) for text, line in zip(texts, lines, strict=True)]


@pytest.mark.parametrize(
    ("place", "cases", "start", "facts"),
    [
        ("tokenizers/llama2", "llama2", [1], (32000, 1, (2,))),
        ("tokenizers/llama2_hf", "llama2", [1], (32045, None, ())),
        ("models/gpt2-60m", "gpt2", [], (50257, 50256, (50256,))),
    ],
)
def test_golden_ids(shared: pathlib.Path, place: str, cases: str, start: list[int], facts: object) -> None:
    tokenizer, whole = load_tokenizer(shared / place), read_cases(shared / "tokenizers" / cases)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == facts
    assert len(whole) == 47
    for text, ids in whole:
        assert tokenizer.encode(text, bos=False) == ids
        assert tokenizer.encode(text) == start + ids
        assert tokenizer.decode(start + ids) == text
        assert stream(tokenizer, start + ids)[-1] == text


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=100)
@given(text=TEXTS)
@example(text="")
@example(text="  two spaces first")
@example(text="🦙")
def test_text_survives_and_streams(small: dict[str, Tokenizer], name: str, text: str) -> None:
    tokenizer, data = small[name], b""
    ids, first = tokenizer.encode(text), " " if tokenizer.drops_first_space else ""
    printed, expected = stream(tokenizer, ids), text.replace("▁", " ") if first else text
    assert tokenizer.decode(ids) == printed[-1] == expected
    for token_id, so_far in zip(ids, printed[:-1], strict=True):
        data += tokenizer.token_bytes(token_id)
        assert so_far == data.decode(errors="ignore").removeprefix(first)


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_any_ids_stream_as_they_decode(small: dict[str, Tokenizer], name: str, data: st.DataObject) -> None:
    tokenizer = small[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3)))
    assert stream(tokenizer, ids)[-1] == tokenizer.decode(ids)


@pytest.mark.parametrize("removes_blanks", [False, True])
def test_any_ids_decode_as_by_sentencepiece(tmp_path: pathlib.Path, removes_blanks: bool) -> None:
    """Blanks at the start, unknown tokens, and bytes that make no character."""
    make_sentencepiece(tmp_path, remove_extra_whitespaces=removes_blanks)
    tokenizer = load_tokenizer(tmp_path)
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    rng = random.Random(1)
    every = [i for i in range(library.vocab_size()) if not library.is_control(i)]
    blanks = [i for i in every if library.id_to_piece(i).startswith("▁")]
    octets = [i for i in every if library.is_byte(i)]
    for _ in range(2000):
        ids = [rng.choice(rng.choice((every, blanks, octets, [library.unk_id()]))) for _ in range(5)]
        begins = [i for i in ids if set(library.id_to_piece(i)) != {"▁"}]
        if not begins or library.id_to_piece(begins[0]) not in ("<unk>", "<0x20>"):
            assert tokenizer.decode(ids) == library.decode(ids), [library.id_to_piece(i) for i in ids]
        assert stream(tokenizer, ids)[-1] == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["sentencepiece", "spaced json"])
def test_a_continued_text_keeps_its_space(small: dict[str, Tokenizer], name: str) -> None:
    ids = small[name].encode("the cat", bos=False)
    assert stream(small[name], ids, at_start=True)[-1] == "the cat"
    assert stream(small[name], ids, at_start=False)[-1] == " the cat"


@pytest.mark.parametrize("name", FORMATS)
def test_a_cut_character_is_held_then_replaced(small: dict[str, Tokenizer], name: str) -> None:
    tokenizer = small[name]
    ids = tokenizer.encode("🦙", bos=False)
    llama = ids[-4:]
    assert b"".join(map(tokenizer.token_bytes, llama)) == "🦙".encode()
    assert stream(tokenizer, llama) == ["", "", "", "🦙", "🦙"]
    n = 3 if name == "sentencepiece" else 1  # it replaces each byte, the others each beginning of a character
    assert stream(tokenizer, llama[:3]) == ["", "", "", "\ufffd" * n]
    n = min(n, 2)
    assert stream(tokenizer, llama[:2] + llama[:1]) == ["", "", "\ufffd" * n, "\ufffd" * (n + 1)]


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_no_text(small: dict[str, Tokenizer], name: str) -> None:
    tokenizer = small[name]
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.decode([tokenizer.vocab_size + 100]) == ""
    with pytest.raises(TokenizerError, match=f"-1 is negative; ids run from 0 to {tokenizer.vocab_size - 1}"):
        tokenizer.token_bytes(-1)
    with pytest.raises(TokenizerError, match="at character 2"):
        small[name].encode("ab\udcff")


def test_pieces_of_other_decoders_agree_with_the_library() -> None:
    decoders, ids = tokenizers.decoders, ["▁the", "▁cat", "s", "<0x41>"]
    spaces, fuse = decoders.Replace("▁", " "), decoders.Fuse()
    for decoder in (
        *(decoders.Metaspace(prepend_scheme=scheme) for scheme in ("first", "never")),
        decoders.Sequence([spaces, decoders.ByteFallback(), fuse]),
        decoders.Sequence([spaces, fuse, decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Sequence([decoders.ByteLevel()])]),
    ):
        pieces = read_pieces(json.loads(decoder.__getstate__()))
        data = b"".join(map(pieces.to_bytes, ids))
        assert data.removeprefix(b" " if pieces.drops_first_space else b"").decode() == decoder.decode(ids)


# Tokenizers of GGUF files

TEXTS_OF_FILES = ["Hello world", "  two  spaces ", "naïve 🦙 中文\n\ttab", "12345 don't I'LL", "<s> a </s>", ""]


@pytest.mark.parametrize(("place", "cases"), [("tokenizers/llama2", "llama2"), ("models/gpt2-60m", "gpt2")])
def test_a_gguf_file_has_the_ids_of_what_it_was_made_from(
    shared: pathlib.Path, tmp_path: pathlib.Path, place: str, cases: str
) -> None:
    source = shared / place
    path = gguf_writer.write_vocabulary(tmp_path, lambda writer: gguf_writer.write_tokenizer(writer, source))
    ours, theirs = load_tokenizer(import_gguf(path)[0]), load_tokenizer(source)
    assert ours.eos_ids == theirs.eos_ids
    texts = [text for text, _ in read_cases(shared / "tokenizers" / cases)]
    for text in [*texts, *TEXTS_OF_FILES, *(["a<|endoftext|>b"] if cases == "gpt2" else [])]:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize(
    ("split", "cuts"),
    [
        ("gpt-4o", ["camel", "Case's", " x", "123", "45", "//\n", " Ünï"]),
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

    folder, _ = import_gguf(gguf_writer.write_vocabulary(tmp_path, fill))
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "".join(cuts)
    assert [text[a:b] for _, (a, b) in library.pre_tokenizer.pre_tokenize_str(text)] == cuts


def test_special_tokens_and_the_chat_template(tmp_path: pathlib.Path) -> None:
    """Control tokens but begin and end can be written in a text, and end an answer if their name says so."""
    octets = [f"<0x{i:02X}>" for i in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *octets, "▁", "a", "<|im_start|>", "<|im_end|>"]

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * len(tokens))
        writer.add_token_types([2, 3, 3, *[6] * 256, 1, 1, 3, 3])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template("{{ messages }}")

    path = gguf_writer.write_vocabulary(tmp_path, fill)
    folder, _ = import_gguf(path)
    tokenizer, n = load_tokenizer(folder), len(tokens)
    assert tokenizer.eos_ids == (2, n - 1)
    assert tokenizer.encode("a<|im_end|>", bos=False)[-2:] == [n - 3, n - 1]
    assert find_template(folder) == "{{ messages }}"


# Files


def test_tokenizer_apart_from_the_model(folders: dict[str, pathlib.Path], tmp_path: pathlib.Path) -> None:
    model = write_json(tmp_path, config={"eos_token_id": 5}, generation_config={"eos_token_id": 6})
    file = folders["sentencepiece"] / "tokenizer.model"
    assert load_tokenizer(file, model_folder=model).eos_ids == (6,)
    assert load_tokenizer(file, config={"eos_token_id": 7}).eos_ids == (7,)
    gpt2 = folders["gpt2"]
    assert load_tokenizer(gpt2 / "vocab.json").encode("the") == load_tokenizer(gpt2).encode("the")


# Special tokens


def test_bos_is_added_where_the_format_or_a_file_says(
    small: dict[str, Tokenizer], copy: Callable[[str], pathlib.Path]
) -> None:
    def told(name: str, adds: bool) -> Tokenizer:
        return load_tokenizer(write_json(copy(name), tokenizer_config={"add_bos_token": adds}))

    more, less = told("gpt2", True), told("sentencepiece", False)
    for tokenizer, bos in ((small["sentencepiece"], 1), (small["spaced json"], 1), (more, more.bos_id)):
        assert tokenizer.encode("the") == [bos, *tokenizer.encode("the", bos=False)]
    for tokenizer in (small["byte-level json"], small["gpt2"], less):
        assert tokenizer.encode("the") == tokenizer.encode("the", bos=False)
    assert less.bos_id == 1


def test_special_tokens_in_text(small: dict[str, Tokenizer]) -> None:
    """Sentencepiece's control symbols are plain text, and so are added tokens that are not special."""
    for name, token in (("spaced json", "<|end|>"), ("byte-level json", END), ("gpt2", END)):
        ids = small[name].encode(f"the{token}", bos=False)
        assert small[name].token_bytes(ids[-1]) == b""
        assert small[name].decode(ids) == "the"
    tokenizer = small["sentencepiece"]
    assert tokenizer.decode(tokenizer.encode("the</s>", bos=False)) == "the</s>"
    assert [tokenizer.token_bytes(token_id) for token_id in range(3)] == [" ⁇ ".encode(), b"", b""]
    tokenizer = small["byte-level json"]
    ids = tokenizer.encode("<tool call>the")
    assert ids[0] == tokenizer.vocab_size - 1
    assert tokenizer.decode(ids) == "<tool call>the"
    assert [len(tokenizer.encode("z" * n)) for n in (1, 8)] == [1, 8]  # no truncation, no padding


@pytest.mark.parametrize(
    ("files", "eos_ids"),
    [
        ({}, (2,)),
        ({"special_tokens_map": {"eos_token": {"content": "<s>"}}}, (1,)),
        ({"special_tokens_map": {"eos_token": "<s>"}, "tokenizer_config": {"eos_token": "<unk>"}}, (0,)),
        ({"tokenizer_config": {"eos_token": "<s>"}, "config": {"eos_token_id": 5}}, (5,)),
        ({"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": [7, 6]}}, (7, 6)),
        ({"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": None}}, (5,)),
        ({"config": {"eos_token_id": [400, 2], "vocab_size": 401}}, (400, 2)),
    ],
)
def test_eos_is_taken_from_the_first_that_says(
    copy: Callable[[str], pathlib.Path], files: dict[str, object], eos_ids: tuple[int, ...]
) -> None:
    assert load_tokenizer(write_json(copy("sentencepiece"), **files)).eos_ids == eos_ids


def test_a_tokenizer_json_learns_its_bos_from_the_files_beside_it(copy: Callable[[str], pathlib.Path]) -> None:
    folder = write_json(copy("spaced json"), generation_config={"bos_token_id": 2, "eos_token_id": 262})
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (2, (262,))
    write_json(folder, tokenizer_config={"bos_token": {"content": "<s>"}})
    assert load_tokenizer(folder).bos_id == 1
    folder = write_json(copy("sentencepiece"), config={"bos_token_id": 0, "eos_token_id": 2})
    assert load_tokenizer(folder).bos_id == 1  # the tokenizer's own goes before the config's


# Missing and damaged files


def refuses(folder: pathlib.Path, *words: str) -> None:
    with raises(TokenizerError, *words):
        load_tokenizer(folder)


def test_files_that_are_no_tokenizer(tmp_path: pathlib.Path) -> None:
    refuses(tmp_path, str(tmp_path))
    refuses(tmp_path / "missing", "missing")
    for content in (b"", b"garbage", b"version https://git-lfs.github.com/spec/v1\noid sha256"):
        (tmp_path / "tokenizer.model").write_bytes(content)
        refuses(tmp_path, "tokenizer.model", "copy it again")
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    refuses(tmp_path, "tokenizer.model", "tokenizer.json")
    library = tokenizers.Tokenizer(BPE({"a": 0}, []))
    for decoder in (None, tokenizers.decoders.WordPiece()):
        library.decoder = decoder
        library.save(str(tmp_path / "tokenizer.json"))
        refuses(tmp_path, "tokenizer.json", "decoder of type", "ByteLevel")


def test_gpt2_without_merges_or_end(copy: Callable[[str], pathlib.Path]) -> None:
    folder = copy("gpt2")
    vocab = json.loads((folder / "vocab.json").read_text())
    write_json(folder, vocab={piece: i for piece, i in vocab.items() if piece != "<|endoftext|>"})
    refuses(folder, "<|endoftext|>", "tokenizer.json")
    (folder / "merges.txt").unlink()
    refuses(folder, "merges.txt", "vocab.json")


REPLACED = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
SEQUENCE = {"Sequence": {"id": "A", "type_id": 0}}
TEMPLATE = {"type": "TemplateProcessing", "single": [SEQUENCE] * 9999, "pair": [], "special_tokens": {}}


def test_pipelines_that_take_all_memory(copy: Callable[[str], pathlib.Path]) -> None:
    """The library ended the process."""
    folder = copy("spaced json")
    file = folder / "tokenizer.json"
    whole = json.loads(file.read_bytes())
    for part, value, word in (
        ("normalizer", {"type": "Sequence", "normalizers": [REPLACED] * 3}, "1,000,000,000 times longer"),
        ("post_processor", TEMPLATE, "9,999 times longer"),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "/////w=="}, "charsmap is damaged"),
    ):
        file.write_text(json.dumps(whole | {part: value}))
        refuses(folder, "tokenizer.json", word)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config": {"eos_token_id": 320}}, ["eos_token_id 320", "320 tokens"]),
        ({"generation_config": {"eos_token_id": [2, -1]}}, ["eos_token_id -1"]),
        ({"config": {"eos_token_id": "</s>"}}, ["eos_token_id is '</s>'"]),
        ({"tokenizer_config": {"bos_token": "<nope>"}}, ["bos_token '<nope>'", "tokenizer_config.json"]),
        ({"tokenizer_config": {"eos_token": 2}}, ["eos_token is 2"]),
        ({"special_tokens_map": ["</s>"]}, ["special_tokens_map.json"]),
    ],
)
def test_contradictions(copy: Callable[[str], pathlib.Path], files: dict[str, object], words: list[str]) -> None:
    refuses(write_json(copy("sentencepiece"), **files), *words)
