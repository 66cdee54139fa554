"""Text in every tokenizer format: what was encoded is decoded and streamed again, as by the libraries."""

import json
import pathlib
import random
import re

import pytest
import sentencepiece
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizer_cases import FORMATS, make_folders, make_sentencepiece, stream

from edgekv.errors import TokenizerError
from edgekv.text import Tokenizer, load_tokenizer
from edgekv.text.formats import read_pieces

PIECES = [" ", "  ", "the", " cat", "\n", "é", "🦙", "👩‍👩‍👧", "中文", "\0", "<0x41>", "<tool call>"]
SPECIAL = re.compile(r"</?s>|<unk>|<\|")
TEXTS = (
    st.text(st.characters(exclude_categories=["Cs"])) | st.lists(st.sampled_from(PIECES)).map("".join)
).filter(lambda text: not SPECIAL.search(text))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    return make_folders(tmp_path_factory)


@pytest.fixture(scope="module")
def small(folders: dict[str, pathlib.Path]) -> dict[str, Tokenizer]:
    return {name: load_tokenizer(folder) for name, folder in folders.items()}


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
