"""One answer of a chat: what the parts of its text add up to."""

from __future__ import annotations

from typing import Any

from edgekv.server.answer_parser import AnswerParser, CallArguments, CallBegin, Content, Delta, Reasoning
from edgekv.server.checked_request import CheckedRequest
from edgekv.server.tools import ToolFormat

Json = dict[str, Any]


class ChatAnswer:
    """One answer of a chat as it grows: content, reasoning, tool calls, and why it ended."""

    def __init__(self, request: CheckedRequest, thinks: bool, form: ToolFormat) -> None:
        tools = request.tools
        names = tuple(function.name for function in tools.callable) if tools else ()
        self._reader = AnswerParser(
            thinks=thinks, form=form if names else None, names=names, forced=bool(tools and tools.forced)
        )
        self.content = self.reasoning = ""
        self.n_reasoning = 0  # tokens, with those of the marks around it
        self.calls: list[Json] = []
        self.reason: str | None = None

    def push(self, text: str, n_tokens: int) -> list[Delta]:
        """What the next piece of text adds."""
        thought = self._reader.is_thinking
        deltas = self._kept(self._reader.push(text))
        self.n_reasoning += n_tokens if thought or self._reader.is_thinking else 0
        return deltas

    def end(self, reason: str) -> list[Delta]:
        """What was held back; ``reason``: why the text ended."""
        deltas = self._kept(self._reader.end())
        self.reason = "tool_calls" if self.calls and reason == "stop" and not self._reader.is_cut else reason
        return deltas

    def message(self) -> Json:
        """OpenAI's message, once it has ended."""
        message: Json = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        if self.reasoning.strip():
            message["reasoning_content"] = self.reasoning.strip()
        if self.calls:
            message["tool_calls"] = self.calls
        return message

    def _kept(self, deltas: list[Delta]) -> list[Delta]:
        for delta in deltas:
            if isinstance(delta, Content):
                self.content += delta.text
            elif isinstance(delta, Reasoning):
                self.reasoning += delta.text
            elif isinstance(delta, CallBegin):
                function = {"name": delta.name, "arguments": ""}
                self.calls.append({"id": delta.id, "type": "function", "function": function})
            else:
                self.calls[delta.number]["function"]["arguments"] += delta.text
        return deltas


def delta_json(delta: Delta) -> Json:
    """OpenAI's delta of a chunk."""
    if isinstance(delta, Content):
        return {"content": delta.text}
    if isinstance(delta, Reasoning):
        return {"reasoning_content": delta.text}
    if isinstance(delta, CallArguments):
        return {"tool_calls": [{"index": delta.number, "function": {"arguments": delta.text}}]}
    function = {"name": delta.name, "arguments": ""}
    return {"tool_calls": [{"index": delta.number, "id": delta.id, "type": "function", "function": function}]}
