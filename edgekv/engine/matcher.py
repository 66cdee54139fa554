"""llguidance, run in a bounded child: a vocabulary, and what may come next in one text. `grammar` asks it.

Requests are JSON: first the vocabulary, then for each text its schema or grammar and one token after the other. An
answer is one of the letters below and a mask of bits, a text to be encoded, or what is wrong.
"""

from __future__ import annotations

import json
from typing import Any

from edgekv import child

MASK, STOPPED, ENCODE, ERROR = b"m", b".", b"?", b"!"
COMPACT = {"whitespace_flexible": False}  # small models else go on and on with blanks
_now: dict[str, Any] = {}  # llguidance's view of the vocabulary, and what follows the text


class _Vocabulary:
    """What llguidance asks of a tokenizer: every token's bytes, and which are no text."""

    def __init__(self, about: dict[str, Any]) -> None:
        self.eos_token_id, self.bos_token_id = about["eos"][0], about["bos"]
        self.special_token_ids = about["special"]
        self.tokens = [token.encode("latin-1") for token in about["tokens"]]

    def __call__(self, text: str) -> list[int]:
        """llguidance tries bytes first, once: they have no `encode`, and then it gives strings."""
        result: list[int] = json.loads(child.ask(ENCODE + text.encode()))
        return result


def answer(request: bytes) -> bytes:
    """See above."""
    import llguidance

    data: dict[str, Any] = json.loads(request)
    if "tokens" in data:
        wrapper = llguidance.TokenizerWrapper(_Vocabulary(data))
        _now["vocabulary"] = llguidance.LLTokenizer(wrapper, n_vocab=data["n_vocab"], eos_token=data["eos"])
        return b""
    if "token" in data:
        _now["matcher"].consume_token(data["token"])
    else:
        try:
            lark = data.get("lark")
            if lark is None:
                lark = llguidance.LLMatcher.grammar_from_json_schema(data["schema"], defaults=COMPACT)
        except ValueError as error:
            return ERROR + str(error).encode()
        _now["matcher"] = llguidance.LLMatcher(_now["vocabulary"], lark, log_level=0)
    return _next(_now["matcher"])


def _next(matcher: Any) -> bytes:
    if not matcher.is_error():
        if matcher.is_stopped():
            return STOPPED
        mask: bytes = matcher.compute_bitmask()
    return ERROR + str(matcher.get_error()).encode() if matcher.is_error() else MASK + mask
