"""Errors of the tokenizers' libraries, which are written in Rust and C++, as TokenizerError."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from edgekv.errors import TokenizerError

OURS = (KeyboardInterrupt, SystemExit, GeneratorExit, TokenizerError)
MAX_VOCABULARY = 1 << 24


@contextlib.contextmanager
def library_errors(what: str, hint: str) -> Iterator[None]:
    """``what`` begins the message. Rust's panics are no Exception but a BaseException."""
    try:
        yield
    except OURS:
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise TokenizerError(f"{what} ({reason}); {hint}") from None


def require_vocabulary(what: str, size: int) -> None:
    """TokenizerError for more tokens than any model has: tables of them are made."""
    if size > MAX_VOCABULARY:
        raise TokenizerError(f"{what} has token ids up to {size - 1}; accepted: below {MAX_VOCABULARY}")
