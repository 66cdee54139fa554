"""Why a text ended, for programs and for people."""

from __future__ import annotations

import dataclasses
from typing import Literal

FinishReason = Literal["stop", "length"]
"""OpenAI's: "stop" where the text came to its end, "length" where it was cut off."""


@dataclasses.dataclass(frozen=True)
class Finish:
    """The ``reason`` for programs, the ``message`` for people."""

    reason: FinishReason
    message: str


END_OF_TEXT = Finish("stop", "end of text")
STOP_STRING = Finish("stop", "stop string")
END_OF_SCHEMA = Finish("stop", "end of schema")
MAX_NEW_TOKENS = Finish("length", "max_new_tokens")


def context_full(ctx: int) -> Finish:
    """The end of a text for which no room is left in ``ctx`` tokens."""
    return Finish("length", f"context full ({ctx} tokens); raise `ctx` for more, or set overflow='slide'")
