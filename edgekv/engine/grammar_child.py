"""llguidance in a bounded child process, which tells `grammar` what tokens may come next in a text.

Requests are JSON: first the vocabulary, then for each text its schema or grammar and one token after the other. An
answer is one of the letters below, followed by a mask of bits, a text to be encoded, or an error message.
"""

from __future__ import annotations

import json
from typing import Any

from edgekv import child

MASK, STOPPED, ENCODE, ERROR = b"m", b".", b"?", b"!"
COMPACT = {"whitespace_flexible": False}  # otherwise small models write blanks for ever
_state: dict[str, Any] = {}  # llguidance's vocabulary, and the matcher that follows the present text


class _Vocabulary:
    """The tokenizer that llguidance expects: every token's bytes, and which of them are special."""

    def __init__(self, about: dict[str, Any]) -> None:
        self.eos_token_id, self.bos_token_id = about["eos"][0], about["bos"]
        self.special_token_ids = about["special"]
        self.tokens = [token.encode("latin-1") for token in about["tokens"]]

    def __call__(self, text: str) -> list[int]:
        # llguidance tries bytes first, once: they have no `encode`, and then it gives strings.
        result: list[int] = json.loads(child.ask(ENCODE + text.encode()))
        return result


def answer(request: bytes) -> bytes:
    """Answers one request, as the module's docstring says."""
    import llguidance

    data: dict[str, Any] = json.loads(request)
    if "tokens" in data:
        wrapper = llguidance.TokenizerWrapper(_Vocabulary(data))
        _state["vocabulary"] = llguidance.LLTokenizer(wrapper, n_vocab=data["n_vocab"], eos_token=data["eos"])
        return b""
    if "token" in data:
        _state["matcher"].consume_token(data["token"])
    else:
        try:
            lark = data.get("lark")
            if lark is None:
                lark = llguidance.LLMatcher.grammar_from_json_schema(data["schema"], defaults=COMPACT)
        except ValueError as error:
            return ERROR + str(error).encode()
        _state["matcher"] = llguidance.LLMatcher(_state["vocabulary"], lark, log_level=0)
    matcher = _state["matcher"]
    if not matcher.is_error():
        if matcher.is_stopped():
            return STOPPED
        mask: bytes = matcher.compute_bitmask()
    return ERROR + str(matcher.get_error()).encode() if matcher.is_error() else MASK + mask
