"""The JSON of OpenAI's answers, whole and in chunks."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Usage:
    """Tokens of one answer; ``cached`` of the prompt's were not computed again."""

    prompt: int
    cached: int
    completion: int

    def as_json(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Shape:
    """The JSON of one answer, whole or in chunks."""

    def __init__(self, kind: str, model: str) -> None:
        self.is_chat = kind == "chat"
        prefix, self._object = ("chatcmpl-", "chat.completion") if self.is_chat else ("cmpl-", "text_completion")
        self._base = {"id": prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model}

    def whole(self, text: str, reason: str, usage: Usage) -> dict[str, Any]:
        """An answer in one piece."""
        content = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        return self._answer(self._object, content, reason) | {"usage": usage.as_json()}

    def first(self) -> dict[str, Any] | None:
        """The chunk that opens a chat's answer."""
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, None) if self.is_chat else None

    def piece(self, text: str) -> dict[str, Any]:
        """A chunk with more text."""
        return self._chunk({"delta": {"content": text}} if self.is_chat else {"text": text}, None)

    def last(self, reason: str) -> dict[str, Any]:
        """The chunk that says why the answer ended."""
        return self._chunk({"delta": {}} if self.is_chat else {"text": ""}, reason)

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The chunk with the usage, behind the last one."""
        return {**self._base, "object": self._chunk_object, "choices": [], "usage": usage.as_json()}

    @property
    def _chunk_object(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _chunk(self, content: Mapping[str, Any], reason: str | None) -> dict[str, Any]:
        return self._answer(self._chunk_object, content, reason)

    def _answer(self, kind: str, content: Mapping[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": reason}
        return {**self._base, "object": kind, "choices": [choice]}
