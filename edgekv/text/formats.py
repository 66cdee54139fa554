"""The file formats of tokenizers: tokenizer.json, GPT-2's vocab.json with merges.txt, sentencepiece's models.

Only the library in use is imported, as each takes 50 ms or more.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from edgekv.errors import TokenizerError
from edgekv.files import read_regular
from edgekv.text.tokenizer import (
    EACH_BYTE,
    MAX_VOCABULARY,
    SpecialTokens,
    Tokenizer,
    library_errors,
    read_declared,
)

if TYPE_CHECKING:
    import tokenizers

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # in order of preference
GPT2_END = "<|endoftext|>"
MAX_GROWTH = 64  # factor by which a pipeline may lengthen a text
SPACE = "▁"
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def load_tokenizer(
    path: pathlib.Path,
    *,
    model_folder: pathlib.Path | None = None,
    config: Mapping[str, Any] | None = None,
) -> Tokenizer:
    """Opens a tokenizer: a folder with tokenizer.json, tokenizer.model, or vocab.json and merges.txt, or a file.

    Special tokens come from tokenizer_config.json and special_tokens_map.json beside it, and from the model's
    generation_config.json and config.json, in ``model_folder`` if not there. config: the content of config.json,
    if it is no file. Raises TokenizerError where there is none, and for one that is damaged or contradicts these
    files.
    """
    file = path if os.path.isfile(path) else next((path / n for n in FILES if os.path.isfile(path / n)), None)
    if file is None:
        raise TokenizerError(
            f"{path} has no tokenizer: copy tokenizer.json, tokenizer.model, or vocab.json and merges.txt "
            "beside the weights",
            field="tokenizer",
            advice="or pass {tokenizer:PATH}",
        )
    try:
        data = read_regular(file)
    except OSError as error:
        what = f"{file} can't be read: {error.strerror}; make it readable, or copy it again"
        raise TokenizerError(what) from None
    declared = read_declared(file.parent, model_folder or file.parent, config)
    if file.name == "vocab.json":
        return open_gpt2(file, file.with_name("merges.txt"), declared)
    if file.suffix != ".json":
        return SentencePieceTokenizer(file, data, declared)
    import tokenizers

    with library_errors(f"{file} is not a tokenizer.json", "copy it again"):
        _require_bounded(file, data)
        return HuggingFaceTokenizer(file, tokenizers.Tokenizer.from_buffer(data), declared)


class HuggingFaceTokenizer(Tokenizer):
    """A pipeline of the tokenizers library, whose post-processor decides what `encode(bos=True)` adds.

    declared: special tokens of the files beside it. own_end: the id that is BOS and EOS unless others are
    declared. Raises TokenizerError for a decoder that is neither byte-level nor of sentencepiece's kind.
    """

    def __init__(
        self,
        path: pathlib.Path,
        library: tokenizers.Tokenizer,
        declared: SpecialTokens,
        own_end: int | None = None,
    ) -> None:
        library.no_truncation()
        library.no_padding()
        self._library = library
        decoder = {"type": "none"} if library.decoder is None else json.loads(library.decoder.__getstate__())
        pieces = read_pieces(decoder)
        if pieces is None:
            raise TokenizerError(
                f"{path} has a decoder of type {decoder['type']}; supported are ByteLevel, Metaspace and "
                "sentencepiece's Replace: use the tokenizer.model or vocab.json of this model instead"
            )
        self._pieces, self.drops_first_space = pieces, pieces.drops_first_space
        self.vocab_size = 1 + max(library.get_vocab(with_added_tokens=True).values(), default=-1)
        if self.vocab_size > MAX_VOCABULARY:
            raise TokenizerError(
                f"{path} has token ids up to {self.vocab_size - 1}; accepted: below {MAX_VOCABULARY}"
            )
        self.bos_id, self.eos_ids = declared.resolve(
            library.token_to_id, self.vocab_size, own_end, () if own_end is None else (own_end,)
        )
        ends = {self.bos_id, *self.eos_ids}
        self._added = {
            token_id: b"" if token.special or token_id in ends else token.content.encode()
            for token_id, token in library.get_added_tokens_decoder().items()
        }
        self.special_texts = tuple(self.piece(token_id) for token_id, data in self._added.items() if not data)

    def piece(self, token_id: int) -> str:
        return self._library.id_to_token(token_id) or ""

    def _encode(self, text: str, bos: bool) -> list[int]:
        return self._library.encode(text, add_special_tokens=bos).ids

    def _token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        piece = self._library.id_to_token(token_id)
        return b"" if piece is None else self._pieces.to_bytes(piece)


class _Pipeline(msgspec.Struct):
    """The parts of a tokenizer.json that change a text's length."""

    normalizer: Any = None
    post_processor: Any = None


def _require_bounded(path: pathlib.Path, data: bytes) -> None:
    """Raises TokenizerError for a pipeline that lengthens a text so much that the library ends the process."""
    try:
        pipeline = msgspec.json.decode(data, type=_Pipeline)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TokenizerError(f"{path} is not a tokenizer.json ({error}); copy it again") from None
    growth, todo = 1, [pipeline.normalizer, pipeline.post_processor]
    while todo:
        part = todo.pop()
        todo += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        if not isinstance(part, dict):
            continue
        if isinstance(content := part.get("content"), str):
            growth *= max(1, len(content))
        if isinstance(single := part.get("single"), list):
            growth *= max(1, sum("Sequence" in x for x in single if isinstance(x, dict)))
        if isinstance(table := part.get("precompiled_charsmap"), str):
            start = base64.b64decode(table[:8])
            if not 4 <= int.from_bytes(start[:4], "little") <= 3 * len(table) // 4 - 4:
                raise TokenizerError(f"{path}: its precompiled_charsmap is damaged; copy it again")
    if growth > MAX_GROWTH:
        raise TokenizerError(
            f"{path}: makes a text up to {growth:,} times longer; accepted: {MAX_GROWTH:,}; copy the model's own"
        )


def open_gpt2(vocab: pathlib.Path, merges: pathlib.Path, declared: SpecialTokens) -> HuggingFaceTokenizer:
    """Reads GPT-2's vocab.json and merges.txt. No BOS is added unless tokenizer_config.json asks for one.

    Raises TokenizerError where a file is missing or damaged, or the vocabulary is not GPT-2's.
    """
    import tokenizers

    if not merges.is_file():
        raise TokenizerError(f"{vocab} needs its merges.txt, which is not beside it; copy it there")
    with library_errors(f"{vocab} and merges.txt don't fit", "copy both again"):
        model = tokenizers.models.BPE.from_file(str(vocab), str(merges))
    library = tokenizers.Tokenizer(model)
    end = library.token_to_id(GPT2_END)
    if end is None:
        raise TokenizerError(
            f"{vocab} has no {GPT2_END}, so it is not GPT-2's; copy the model's tokenizer.json beside it"
        )
    library.add_special_tokens([GPT2_END])
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    if declared.add_bos_token:
        library.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{GPT2_END} $A", special_tokens=[(GPT2_END, end)]
        )
    with library_errors(f"{vocab} can't be used", "copy it again"):
        return HuggingFaceTokenizer(vocab, library, declared, own_end=end)


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte of each of GPT-2's letters: itself where it prints, else the next of U+0100, U+0101, ..."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


BYTE_ALPHABET = _byte_alphabet()


@dataclasses.dataclass(frozen=True)
class Pieces:
    """How a vocabulary writes bytes: as letters of BYTE_ALPHABET (GPT-2, Llama 3), or as text (sentencepiece).

    space: the character for a blank in text; None: letters are bytes. byte_fallback: `<0x0A>` stands for a byte.
    """

    space: str | None = None
    byte_fallback: bool = False
    drops_first_space: bool = False

    def to_bytes(self, piece: str) -> bytes:
        """Returns the bytes of a piece; its UTF-8 where letters should be bytes and are not."""
        if self.space is None:
            is_bytes = BYTE_ALPHABET.keys() >= {*piece}
            return bytes(BYTE_ALPHABET[letter] for letter in piece) if is_bytes else piece.encode()
        byte = BYTE_PIECE.fullmatch(piece) if self.byte_fallback else None
        return bytes([int(byte[1], 16)]) if byte else piece.replace(self.space, " ").encode()


def read_pieces(decoder: Mapping[str, Any]) -> Pieces | None:
    """Returns how a decoder's vocabulary writes bytes, or None for a decoder of another kind."""
    steps = list(_steps(decoder))
    types = {step["type"] for step in steps}
    if "ByteLevel" in types:
        return Pieces()
    space, drops = None, False
    for step in steps:
        if step["type"] == "Metaspace":
            space, drops = space or step["replacement"], drops or step["prepend_scheme"] != "never"
        elif step["type"] == "Replace" and step["content"] == " ":
            space = space or step["pattern"].get("String")
        elif step["type"] == "Strip" and step["content"] == " ":
            drops = drops or step["start"] > 0
    return None if space is None else Pieces(space, "ByteFallback" in types, drops)


def _steps(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    else:
        yield decoder


class SentencePieceTokenizer(Tokenizer):
    """A `tokenizer.model` protobuf, by the sentencepiece library.

    BOS is prepended unless tokenizer_config.json says `"add_bos_token": false`. Decoding gives the library's text,
    but for a blank before an unknown token, or in a byte token, that begins a text.
    """

    utf8_errors = EACH_BYTE
    special_texts = ()

    def __init__(self, path: pathlib.Path, data: bytes, declared: SpecialTokens) -> None:
        import sentencepiece

        try:
            self._library = sentencepiece.SentencePieceProcessor(model_proto=data or b"none")
        except (RuntimeError, ValueError):
            raise TokenizerError(
                f"{path} is no sentencepiece model: copy it again, or take the tokenizer.json that lies beside it"
            ) from None
        self.vocab_size = self._library.vocab_size()
        bos_id, eos_id = self._library.bos_id(), self._library.eos_id()
        self.bos_id, self.eos_ids = declared.resolve(
            self._find,
            self.vocab_size,
            own_bos=bos_id if bos_id >= 0 else None,
            own_eos=(eos_id,) if eos_id >= 0 else (),
        )
        self._start = [] if self.bos_id is None or declared.add_bos_token is False else [self.bos_id]
        with library_errors(f"{path} can't be used", "copy it again"):
            self.drops_first_space = self._library.encode("a", out_type=str)[0].startswith(SPACE)
            self.drops_first_spaces = self._library.encode("  a") == self._library.encode("a")
            self._unknown = str(self._library.decode([self._library.unk_id()])).encode()

    def _find(self, name: str) -> int | None:
        token_id: int = self._library.piece_to_id(name)
        return token_id if self._library.id_to_piece(token_id) == name else None

    def piece(self, token_id: int) -> str:
        return str(self._library.id_to_piece(token_id))

    def _encode(self, text: str, bos: bool) -> list[int]:
        ids: list[int] = self._library.encode(text)
        return self._start + ids if bos else ids

    def _token_bytes(self, token_id: int) -> bytes:
        if self._library.is_control(token_id):
            return b""
        if self._library.is_unknown(token_id):
            return self._unknown  # " ⁇ ", or what the model has for it
        piece: str = self._library.id_to_piece(token_id)
        if self._library.is_byte(token_id):
            return bytes([int(piece[1:-1], 16)])  # <0x0A>
        return piece.replace(SPACE, " ").encode()
