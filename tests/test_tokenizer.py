"""Tokenizers against golden ids, against the libraries' own decoders, and on damaged files."""

import base64
import json
import pathlib
import random
import re
import shutil
from collections.abc import Callable

import pytest
import sentencepiece
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgekv.errors import TokenizerError
from edgekv.tokenizer import StreamDecoder, Tokenizer, load_tokenizer
from edgekv.tokenizer.byte_pairs import MAX_RUN
from edgekv.tokenizer.load import FILES
from edgekv.tokenizer.pieces import read_pieces

FORMATS = ("sentencepiece", "spaced json", "byte-level json", "gpt2", "tiktoken")
SENTENCES = ["Once upon a time, there was a little girl named Lily.", "the cat sat on the mat", "été à Ωmega"]
LETTERS = sorted({letter for letter in "".join(SENTENCES) if letter != " "})
PIECES = [" ", "  ", "the", " cat", "\n", "é", "🦙", "👩‍👩‍👧", "中文", "\0", "<0x41>", "<tool call>"]
SPECIAL = re.compile(r"</?s>|<unk>|<\|")
TEXTS = (
    st.text(st.characters(exclude_categories=["Cs"])) | st.lists(st.sampled_from(PIECES)).map("".join)
).filter(lambda text: not SPECIAL.search(text))
BPE = tokenizers.models.BPE


def write_json(folder: pathlib.Path, **files: object) -> pathlib.Path:
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def make_sentencepiece(folder: pathlib.Path, *, remove_extra_whitespaces: bool = False) -> None:
    with (folder / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(SENTENCES),
            model_writer=file,
            model_type="bpe",
            vocab_size=320,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=remove_extra_whitespaces,
            minloglevel=2,
        )


def make_spaced_json(folder: pathlib.Path) -> None:
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *LETTERS,
        "he",
        "▁t",
        "▁the",
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("h", "e"), ("▁", "t"), ("▁t", "he")]
    library = tokenizers.Tokenizer(BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.add_special_tokens(["<unk>", "<s>", "</s>", "<|end|>"])
    library.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    library.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    library.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    library.save(str(folder / "tokenizer.json"))


def train_byte_level() -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    library.train_from_iterator(SENTENCES, trainer)
    return library


def make_byte_level_json(folder: pathlib.Path) -> None:
    library = train_byte_level()
    library.add_tokens(["<tool call>"])
    library.enable_truncation(4)
    library.enable_padding(length=4)
    library.save(str(folder / "tokenizer.json"))


def make_gpt2(folder: pathlib.Path) -> None:
    train_byte_level().model.save(str(folder))


def make_tiktoken(folder: pathlib.Path) -> None:
    tokens = [*(bytes([byte]) for byte in range(256)), b"he", b"th", b"the", b" the", b"  "]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (folder / "tokenizer.model").write_text("".join(lines))


MAKE: dict[str, Callable[[pathlib.Path], None]] = {
    "sentencepiece": make_sentencepiece,
    "spaced json": make_spaced_json,
    "byte-level json": make_byte_level_json,
    "gpt2": make_gpt2,
    "tiktoken": make_tiktoken,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    made = {}
    for name, make in MAKE.items():
        made[name] = tmp_path_factory.mktemp(name.replace(" ", "_"))
        make(made[name])
    return made


@pytest.fixture(scope="module")
def small(folders: dict[str, pathlib.Path]) -> dict[str, Tokenizer]:
    return {name: load_tokenizer(folder) for name, folder in folders.items()}


@pytest.fixture
def copy(folders: dict[str, pathlib.Path], tmp_path: pathlib.Path) -> Callable[[str], pathlib.Path]:
    """A private copy of a small tokenizer's folder, to damage or to add to."""
    return lambda name: pathlib.Path(shutil.copytree(folders[name], tmp_path / "model"))


def stream(tokenizer: Tokenizer, ids: list[int], *, at_start: bool = True) -> list[str]:
    """What has been printed after each token, and after the flush."""
    decoder = StreamDecoder(tokenizer, at_start=at_start)
    parts = [decoder.push(token_id) for token_id in ids] + [decoder.flush()]
    return ["".join(parts[: i + 1]) for i in range(len(parts))]


# Golden ids


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


# Every format: decoding and streaming


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=100)
@given(text=TEXTS)
@example(text="")
@example(text="  two spaces first")
@example(text="🦙")
def test_text_survives_and_streams(small: dict[str, Tokenizer], name: str, text: str) -> None:
    tokenizer = small[name]
    ids = tokenizer.encode(text)
    if tokenizer.drops_first_space:
        text = text.replace("▁", " ")
    assert tokenizer.decode(ids) == text
    printed = stream(tokenizer, ids)
    assert printed[-1] == text
    data = b""
    for token_id, so_far in zip(ids, printed[:-1], strict=True):
        data += tokenizer.token_bytes(token_id)
        whole_characters = data.decode(errors="ignore")
        assert so_far == whole_characters.removeprefix(" " if tokenizer.drops_first_space else "")


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_any_ids_stream_as_they_decode(small: dict[str, Tokenizer], name: str, data: st.DataObject) -> None:
    tokenizer = small[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3)))
    assert stream(tokenizer, ids)[-1] == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["sentencepiece", "spaced json", "byte-level json"])
@settings(deadline=None, max_examples=50)
@given(text=TEXTS)
def test_decoding_agrees_with_the_library(
    folders: dict[str, pathlib.Path], small: dict[str, Tokenizer], name: str, text: str
) -> None:
    ids = small[name].encode(text)
    if name == "sentencepiece":
        processor = sentencepiece.SentencePieceProcessor(model_file=str(folders[name] / "tokenizer.model"))
        expected = processor.decode(ids)
    else:
        library = tokenizers.Tokenizer.from_file(str(folders[name] / "tokenizer.json"))
        expected = library.decode(ids, skip_special_tokens=True)
    assert small[name].decode(ids) == expected


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
def test_ids_past_the_vocabulary_have_no_text(small: dict[str, Tokenizer], name: str) -> None:
    tokenizer = small[name]
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.decode([tokenizer.vocab_size + 100]) == ""
    with pytest.raises(TokenizerError, match=f"-1 is negative; ids run from 0 to {tokenizer.vocab_size - 1}"):
        tokenizer.token_bytes(-1)


@pytest.mark.parametrize("name", FORMATS)
def test_text_that_is_not_unicode_is_refused(small: dict[str, Tokenizer], name: str) -> None:
    with pytest.raises(TokenizerError, match="at character 2"):
        small[name].encode("ab\udcff")


def test_pieces_of_other_decoders_agree_with_the_library() -> None:
    decoders = tokenizers.decoders
    ids = ["▁the", "▁cat", "s", "<0x41>"]
    kinds = {
        "first": decoders.Metaspace(prepend_scheme="first"),
        "never": decoders.Metaspace(prepend_scheme="never"),
        "gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        "end only": decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        "nested": decoders.Sequence([decoders.Sequence([decoders.ByteLevel()])]),
    }
    for kind, decoder in kinds.items():
        pieces = read_pieces(json.loads(decoder.__getstate__()))
        assert pieces is not None, kind
        data = b"".join(map(pieces.to_bytes, ids))
        text = data.removeprefix(b" " if pieces.drops_first_space else b"").decode()
        assert text == decoder.decode(ids), kind


# Special tokens


def test_bos_is_added_where_the_format_does(small: dict[str, Tokenizer]) -> None:
    for name, bos_id in {"sentencepiece": 1, "spaced json": 1, "tiktoken": 261}.items():
        assert small[name].encode("the") == [bos_id, *small[name].encode("the", bos=False)], name
    for name in ("byte-level json", "gpt2"):
        assert small[name].encode("the") == small[name].encode("the", bos=False), name


@pytest.mark.parametrize("name", ["sentencepiece", "tiktoken"])
def test_add_bos_token_false(copy: Callable[[str], pathlib.Path], name: str) -> None:
    tokenizer = load_tokenizer(write_json(copy(name), tokenizer_config={"add_bos_token": False}))
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


def test_llama3_special_tokens_follow_the_base_tokens(small: dict[str, Tokenizer]) -> None:
    tokenizer = small["tiktoken"]
    assert (tokenizer.vocab_size, tokenizer.bos_id) == (261 + 256, 261)
    assert tokenizer.eos_ids == (262, 261 + 8, 261 + 9)
    text = "<|start_header_id|>the<|end_header_id|> the<|eot_id|><|python_tag|>"
    assert tokenizer.encode(text) == [261, 267, 258, 268, 259, 270, 271]
    assert tokenizer.encode("<|reserved_special_token_247|>", bos=False) == [261 + 255]
    assert tokenizer.decode([261, 258, 270]) == "the"


def test_llama3_splits_words_and_numbers_apart(small: dict[str, Tokenizer]) -> None:
    encode = small["tiktoken"].encode
    assert encode("the the", bos=False) == [258, 259]
    assert encode("  the", bos=False) == [32, 259]  # the last space belongs to the word
    assert encode("1th", bos=False) == [49, 257]


@pytest.mark.parametrize("letter", [" ", "x"])
def test_llama3_takes_runs_of_any_length(small: dict[str, Tokenizer], letter: str) -> None:
    text = "the " + letter * (40 * MAX_RUN + 7) + " the"
    assert small["tiktoken"].decode(small["tiktoken"].encode(text)) == text


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


@pytest.mark.parametrize("name", ["sentencepiece", "spaced json", "gpt2", "tiktoken"])
def test_a_truncated_file(copy: Callable[[str], pathlib.Path], name: str) -> None:
    folder = copy(name)
    file = next(folder / file for file in FILES if (folder / file).exists())
    file.write_bytes(file.read_bytes()[:-3])
    refused(folder, file.name, "copy")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("IQ== 0\n!!! 1\n", ["line 2", "!!!"]),
        ("IQ== 0\nIg== one\n", ["line 2", "one"]),
        ("IQ== 0\nIg== 0\n", ["ranks", "0 to 1"]),
        ("IQ== 0\nIg== 1\n", ["no token for byte 0"]),
    ],
)
def test_a_damaged_tiktoken_file(tmp_path: pathlib.Path, lines: str, words: list[str]) -> None:
    (tmp_path / "tokenizer.model").write_text(lines)
    refused(tmp_path, "tokenizer.model", *words)


def test_a_tiktoken_file_cut_at_a_line_contradicts_the_config(copy: Callable[[str], pathlib.Path]) -> None:
    folder = write_json(copy("tiktoken"), config={"bos_token_id": 261, "vocab_size": 517})
    assert load_tokenizer(folder).bos_id == 261
    file = folder / "tokenizer.model"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    refused(folder, "260 tokens", "bos_token_id 261")


def test_gpt2_without_merges_or_end(copy: Callable[[str], pathlib.Path]) -> None:
    folder = copy("gpt2")
    vocab = json.loads((folder / "vocab.json").read_text())
    write_json(folder, vocab={piece: i for piece, i in vocab.items() if piece != "<|endoftext|>"})
    refused(folder, "<|endoftext|>", "tokenizer.json")
    (folder / "merges.txt").unlink()
    refused(folder, "merges.txt", "vocab.json")


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
    refused(folder, "tokenizer_config.json", "can't be read")
