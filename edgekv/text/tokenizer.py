"""Base of the tokenizers: text to token ids and back, also token by token; and their special tokens."""

from __future__ import annotations

import abc
import codecs
import contextlib
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from edgekv.checks import read_fields
from edgekv.errors import TokenizerError
from edgekv.files import MAX_FILE_BYTES, read_object

EACH_BYTE = "edgekv.each-byte"
SEPARATOR = "\ufdd0"  # splits a special token's text so that it is text; Unicode has no such character
BARRIER = "\x02"  # a character that no tokenizer merges with others
PASSED_ON = (KeyboardInterrupt, SystemExit, GeneratorExit, TokenizerError)
MAX_VOCABULARY = 1 << 24  # more than any model has: tables of the tokens are made
TOKEN_FIELDS = "add_bos_token", "bos_token", "eos_token"  # fields of tokenizer_config.json that are read
ID_FIELDS = "bos_token_id", "eos_token_id", "vocab_size"  # and of config.json and generation_config.json


def _replace(error: UnicodeError) -> tuple[str, int]:
    """Decodes invalid bytes as sentencepiece does: U+FFFD for each; others have one for a cut character."""
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _replace)


def _encode_errors() -> contextlib.AbstractContextManager[None]:
    return library_errors("the tokenizer can't encode this text", "shorten it, or copy the tokenizer again")


def as_text(text: str, names: Iterable[str]) -> str:
    """Returns a text in which `Tokenizer.encode` reads the special tokens ``names`` as plain text."""
    for name in names:
        if len(name) > 1 and name in text:
            text = text.replace(name, name[:1] + SEPARATOR + name[1:])
    return text


class Tokenizer(abc.ABC):
    """Base of the tokenizers: encodes texts to token ids, and decodes them.

    vocab_size: one more than the largest token id. special_texts: texts that `encode` reads as special tokens.
    drops_first_space: encoding puts a space before a text, and decoding removes it. drops_first_spaces: decoding
    removes all. utf8_errors: how bytes that are not UTF-8 are decoded.
    """

    vocab_size: int
    special_texts: tuple[str, ...]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    drops_first_space: bool
    drops_first_spaces = False
    utf8_errors = "replace"

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Encodes a text to token ids. bos: with the special tokens that the model's own tokenizer adds.

        Special tokens written in the text (`<|eot_id|>`) become their ids in every format but sentencepiece's;
        `as_text` keeps them from that. Raises TokenizerError for a lone surrogate.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"the text holds {text[error.start]!r} at character {error.start}, which no UTF-8 text can; "
                "pass the text encoded as UTF-8"
            ) from None
        first, *others = text.split(SEPARATOR)
        with _encode_errors():
            ids = self._encode(first, bos)
        for other in others:
            ids += self.encode_inside(other)
        return ids

    def encode_inside(self, text: str) -> list[int]:
        """Encodes a text in the middle of another, without a space before it."""
        with _encode_errors():
            if not self.drops_first_space:
                return self._encode(text, False)
            return self._encode(BARRIER + text, False)[len(self._encode(BARRIER, False)) :]

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes the ids of a whole text. Bytes that are not UTF-8 become U+FFFD, as the format has it."""
        data = b"".join(self.token_bytes(token_id) for token_id in ids)
        if self.drops_first_space:
            data = self.without_first_space(data)
        return data.decode("utf-8", errors=self.utf8_errors)

    def without_first_space(self, data: bytes) -> bytes:
        """Returns the beginning of a text without the space that encoding put there."""
        return data.lstrip(b" ") if self.drops_first_spaces else data.removeprefix(b" ")

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token in the middle of a text; special tokens and unknown ids have none.

        Raises TokenizerError for a negative id.
        """
        if token_id < 0:
            raise TokenizerError(f"token id {token_id} is negative; ids run from 0 to {self.vocab_size - 1}")
        try:
            return self._token_bytes(int(token_id)) if token_id < self.vocab_size else b""
        except (ValueError, OverflowError) as error:
            raise TokenizerError(f"token {token_id} stands for no bytes ({error}); copy its file again") from None

    @abc.abstractmethod
    def piece(self, token_id: int) -> str:
        """Returns a token below `vocab_size` as the vocabulary writes it: `<|eot_id|>`."""

    @abc.abstractmethod
    def _encode(self, text: str, bos: bool) -> list[int]:
        """Encodes a text that is known to be valid Unicode."""

    @abc.abstractmethod
    def _token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of an id below `vocab_size`."""


class StreamDecoder:
    """Turns tokens into text that can be printed at once: bytes that may still become a character are held back.

    The texts of `push` and `flush`, joined, are `tokenizer.decode` of the tokens. at_start: they begin a text, so
    that a first space which the tokenizer added is dropped; else they continue one, such as a prompt.
    """

    def __init__(self, tokenizer: Tokenizer, *, at_start: bool) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors=tokenizer.utf8_errors)
        self._drop_space = at_start and tokenizer.drops_first_space

    def push(self, token_id: int) -> str:
        """Takes a token; returns the text that it completes, which may be empty."""
        data = self._tokenizer.token_bytes(token_id)
        if self._drop_space and data:
            data = self._tokenizer.without_first_space(data)
            self._drop_space = self._tokenizer.drops_first_spaces and not data
        return self._utf8.decode(data)

    def flush(self) -> str:
        """Ends the text; returns U+FFFD for an incomplete character, or an empty text."""
        return self._utf8.decode(b"", final=True)


@contextlib.contextmanager
def library_errors(what: str, hint: str) -> Iterator[None]:
    """Turns a library's errors, among them Rust's panics, into TokenizerErrors: "what (reason); hint"."""
    try:
        yield
    except PASSED_ON:
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise TokenizerError(f"{what} ({reason}); {hint}") from None


class AddedToken(msgspec.Struct):
    content: str


class SpecialTokens(msgspec.Struct):
    """The special tokens by name (tokenizer_config.json) and by id (generation_config.json, config.json).

    vocab_size: the model's, which may exceed the tokenizer's.
    """

    add_bos_token: bool | None = None
    bos_token: str | AddedToken | None = None
    eos_token: str | AddedToken | None = None
    bos_token_id: int | list[int] | None = None
    eos_token_id: int | list[int] | None = None
    vocab_size: Any = None

    def resolve(
        self,
        find: Callable[[str], int | None],
        vocab_size: int,
        own_bos: int | None = None,
        own_eos: tuple[int, ...] = (),
    ) -> tuple[int | None, tuple[int, ...]]:
        """Returns the BOS id and the EOS ids of a tokenizer with ``vocab_size`` tokens.

        The tokenizer's BOS goes before the config's, because it is what the model saw in training; the config's
        EOS goes before the tokenizer's, because it lists every token that ends an answer. find: a token's id by
        name.
        own_bos, own_eos: of the tokenizer's file. Raises TokenizerError for tokens that are nowhere.
        """
        bos = _find_ids("bos_token", self.bos_token, find) or (() if own_bos is None else (own_bos,))
        bos = bos or _as_ids(self.bos_token_id)[:1]
        eos = _as_ids(self.eos_token_id) or _find_ids("eos_token", self.eos_token, find) or own_eos
        limit = max(vocab_size, self.vocab_size if isinstance(self.vocab_size, int) else 0)
        for key, ids in (("bos_token_id", bos), ("eos_token_id", eos)):
            for token_id in ids:
                if not 0 <= token_id < limit:
                    raise TokenizerError(
                        f"{key} {token_id} is not among the {limit} tokens of tokenizer and model; "
                        "correct it in generation_config.json or config.json"
                    )
        return (bos[0] if bos else None), eos


def read_declared(
    tokenizer_folder: pathlib.Path, model_folder: pathlib.Path, config: Mapping[str, Any] | None
) -> SpecialTokens:
    """Reads the JSON files that are there; `config` stands for config.json. Raises TokenizerError."""
    names = [
        _read_object(tokenizer_folder / f"{name}.json") for name in ("special_tokens_map", "tokenizer_config")
    ]
    config = _read_object(model_folder / "config.json") if config is None else config
    ids = config, _read_object(model_folder / "generation_config.json")
    found = {name: value for file in names for name, value in file.items() if name in TOKEN_FIELDS}
    found |= {name: value for file in ids for name, value in file.items() if name in ID_FIELDS}
    return read_fields(found, SpecialTokens, "the tokenizer's files and config.json", "correct it", TokenizerError)


def _read_object(path: pathlib.Path) -> dict[str, Any]:
    """Reads the entries of a JSON object that are not null; there are none without the file."""
    if not path.is_file():
        return {}
    try:
        value = read_object(path, MAX_FILE_BYTES)
    except ValueError as error:
        raise TokenizerError(f"{path} {error}; copy it again, or remove it") from None
    return {key: entry for key, entry in value.items() if entry is not None}


def _as_ids(ids: int | list[int] | None) -> tuple[int, ...]:
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)


def _find_ids(key: str, token: str | AddedToken | None, find: Callable[[str], int | None]) -> tuple[int, ...]:
    if token is None:
        return ()
    name = token if isinstance(token, str) else token.content
    token_id = find(name)
    if token_id is None:
        raise TokenizerError(
            f"{key} {name!r} is not in the tokenizer's vocabulary; "
            "correct it in tokenizer_config.json or special_tokens_map.json"
        )
    return (token_id,)


def possible_start(text: str, marks: Sequence[str]) -> int:
    """Returns the length of the longest end of ``text`` that may be the beginning of one of ``marks``."""
    longest = min(max(map(len, marks), default=1) - 1, len(text))
    starts = (n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks))
    return next(starts, 0)
