"""What every tokenizer format offers."""

import abc
import codecs
import contextlib
from collections.abc import Iterable, Sequence

from edgekv.errors import TokenizerError
from edgekv.tokenizer.native import library_errors

EACH_BYTE = "edgekv.each-byte"
BREAK = "\ufdd0"  # in a special token's text, which then is text; Unicode has no such character
BARRIER = "\x02"  # merges with no letter
codecs.register_error(EACH_BYTE, lambda error: _replaced(error))


def _replaced(error: UnicodeError) -> tuple[str, int]:
    """Sentencepiece's way: U+FFFD for every byte of no character; others have one for a cut character."""
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


def _library_errors() -> contextlib.AbstractContextManager[None]:
    return library_errors("the tokenizer can't encode this text", "shorten it, or copy the tokenizer again")


def as_text(text: str, names: Iterable[str]) -> str:
    """The text, of which `Tokenizer.encode` reads the special tokens ``names`` as the text that they are."""
    for name in names:
        if len(name) > 1 and name in text:
            text = text.replace(name, name[:1] + BREAK + name[1:])
    return text


class Tokenizer(abc.ABC):
    """A model's vocabulary.

    `vocab_size` is one more than the largest token id; the model's embedding may have more rows than that.
    `bos_id` is the beginning-of-text token, or None. Generation stops at any of `eos_ids`.
    `special_texts` are what `encode` reads as special tokens.
    `drops_first_space` says that encoding puts a space before a text, and that decoding takes it away;
    `drops_first_spaces` that it takes all of them away. `utf8_errors` is how bytes that are not UTF-8 are decoded.
    """

    vocab_size: int
    special_texts: tuple[str, ...]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    drops_first_space: bool
    drops_first_spaces = False
    utf8_errors = "replace"

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """The token ids of `text`; `bos` adds the special tokens that the model's own tokenizer adds.

        Special tokens written in the text (`<|eot_id|>`) become their ids in every format but
        sentencepiece's, where control symbols can't be written; `as_text` keeps them from that.

        Raises:
            TokenizerError: `text` holds a lone surrogate, such as Python makes of undecodable bytes.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"the text holds {text[error.start]!r} at character {error.start}, which no UTF-8 text can; "
                "pass the text encoded as UTF-8"
            ) from None
        first, *others = text.split(BREAK)
        with _library_errors():
            ids = self._encode(first, bos)
        for other in others:
            ids += self.encode_inside(other)
        return ids

    def encode_inside(self, text: str) -> list[int]:
        """The token ids of a text in the middle of another: no space is put before it."""
        with _library_errors():
            if not self.drops_first_space:
                return self._encode(text, False)
            return self._encode(BARRIER + text, False)[len(self._encode(BARRIER, False)) :]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` as a whole text. Bytes that are not UTF-8 become U+FFFD, as the format has it."""
        data = b"".join(self.token_bytes(token_id) for token_id in ids)
        if self.drops_first_space:
            data = self.without_first_space(data)
        return data.decode("utf-8", errors=self.utf8_errors)

    def without_first_space(self, data: bytes) -> bytes:
        """The beginning of a text without what encoding has put, or would not have left, there."""
        return data.lstrip(b" ") if self.drops_first_spaces else data.removeprefix(b" ")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token in the middle of a text, perhaps only a part of a UTF-8 character.

        Special tokens have none, nor have the ids past the vocabulary that pad an embedding.

        Raises:
            TokenizerError: `token_id` is negative.
        """
        if token_id < 0:
            raise TokenizerError(f"token id {token_id} is negative; ids run from 0 to {self.vocab_size - 1}")
        try:
            return self._token_bytes(int(token_id)) if token_id < self.vocab_size else b""
        except (ValueError, OverflowError) as error:
            raise TokenizerError(f"token {token_id} stands for no bytes ({error}); copy its file again") from None

    @abc.abstractmethod
    def piece(self, token_id: int) -> str:
        """A token below `vocab_size` as the vocabulary writes it: `<|eot_id|>`."""

    @abc.abstractmethod
    def _encode(self, text: str, bos: bool) -> list[int]:
        """`encode` of a text that is known to be Unicode."""

    @abc.abstractmethod
    def _token_bytes(self, token_id: int) -> bytes:
        """`token_bytes` of an id below `vocab_size`."""
