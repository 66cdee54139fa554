"""Decoding token by token, as a model produces them."""

import codecs

from edgekv.tokenizer.base import Tokenizer


class StreamDecoder:
    """Turns tokens into text that can be printed at once: never a part of a character.

    Bytes that may still become a character are held back, and turn into U+FFFD only when they can't.
    The texts returned by `push` and `flush`, joined, are `tokenizer.decode` of the tokens.

    Args:
        tokenizer: whose tokens are pushed.
        at_start: the tokens begin a text, so that a first space which `tokenizer` added is dropped.
            False when they continue one, such as a prompt.
    """

    def __init__(self, tokenizer: Tokenizer, *, at_start: bool) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors=tokenizer.utf8_errors)
        self._drop_space = at_start and tokenizer.drops_first_space

    def push(self, token_id: int) -> str:
        """The text that this token completes, perhaps none."""
        data = self._tokenizer.token_bytes(token_id)
        if self._drop_space and data:
            data = self._tokenizer.without_first_space(data)
            self._drop_space = self._tokenizer.drops_first_spaces and not data
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What is held back when no more tokens come: U+FFFD for an incomplete character, or nothing."""
        return self._utf8.decode(b"", final=True)
