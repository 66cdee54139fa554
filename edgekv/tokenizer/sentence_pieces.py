"""Sentencepiece models: Llama 1 and 2, Mistral, TinyLlama."""

import pathlib

import sentencepiece

from edgekv.errors import TokenizerError
from edgekv.tokenizer.base import EACH_BYTE, Tokenizer
from edgekv.tokenizer.declared import Declared
from edgekv.tokenizer.native import library_errors

SPACE = "▁"


class SentencePieceTokenizer(Tokenizer):
    """A `tokenizer.model` protobuf, by the sentencepiece library.

    BOS is prepended unless tokenizer_config.json says `"add_bos_token": false`. Decoding gives the library's text,
    but for a blank: before an unknown token or in a byte token `<0x20>` that begins a text it is dropped, and that
    of models trained with `treat_whitespace_as_suffix`, behind a text, stays. Bytes with a control token between
    them can make a character.
    """

    utf8_errors = EACH_BYTE
    special_texts = ()

    def __init__(self, path: pathlib.Path, data: bytes, declared: Declared) -> None:
        self._library = _load(path, data)
        self.vocab_size = self._library.vocab_size()
        bos_id, eos_id = self._library.bos_id(), self._library.eos_id()
        self.bos_id, self.eos_ids = declared.resolve(
            self._find,
            self.vocab_size,
            own_bos=bos_id if bos_id >= 0 else None,
            own_eos=(eos_id,) if eos_id >= 0 else (),
        )
        self._start = [] if self.bos_id is None or declared.add_bos is False else [self.bos_id]
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


def _load(path: pathlib.Path, data: bytes) -> sentencepiece.SentencePieceProcessor:
    try:
        library = sentencepiece.SentencePieceProcessor(model_proto=data) if data else None
    except (RuntimeError, ValueError):
        library = None
    if library is None:
        raise TokenizerError(
            f"{path} is neither a sentencepiece model nor Llama 3's tiktoken file; it is damaged: copy it again"
        )
    return library
