"""From a request to token ids: by the chat template, or as they are given."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from edgekv.chat.template import ChatTemplate
from edgekv.chat.turns import TurnEncoder
from edgekv.server.answer_parser import THINK
from edgekv.server.checked_request import CheckedRequest
from edgekv.server.images import decoded
from edgekv.server.jobs import EncodedPrompt
from edgekv.server.protocol import RequestError
from edgekv.server.tools import MARKS, declared, find_format, spelled_out
from edgekv.tokenizer import Tokenizer
from edgekv.vision.prompt import without_places

REMEMBERED_ANSWERS = 512
KNOWN = 64  # of a conversation's latest answers: the template is rendered once for each
LOOKED_BACK = 8  # tokens of a prompt's end, among which the beginning of the reasoning is looked for


class RequestEncoder:
    """Encodes for one model. From any thread.

    form: how the model writes tool calls. marks: texts by token id, of the special tokens among tools.MARKS, which
    decode to nothing.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, ctx: int, vocab_size: int) -> None:
        self.template, self.tokenizer = template, tokenizer
        self._ctx, self._vocab_size = ctx, vocab_size
        self.form = find_format(template.source)
        self.marks = dict(pair for mark in MARKS if (pair := self._special(mark)))
        self._turns = TurnEncoder(template, tokenizer)
        self._answers: OrderedDict[str, array[int]] = OrderedDict()  # text -> its tokens as generated
        self._lock = threading.Lock()

    def encode(self, request: CheckedRequest) -> list[EncodedPrompt]:
        """The prompts' tokens. Raises RequestError where one does not fit, or is empty."""
        if request.messages is not None:
            return [self._chat(request, request.messages)]
        return [
            EncodedPrompt(self.ids(prompt, "prompt"), self._text(prompt) if request.echo else "")
            for prompt in request.prompts
        ]

    def ids(self, text: str | Sequence[int], field: str) -> list[int]:
        """Of a text, or ids as they are. Raises RequestError."""
        if isinstance(text, str):
            return self._checked(self.tokenizer.encode(without_places(text, self.tokenizer)), field)
        return self._checked(list(text), field)

    def remember(self, text: str, ids: list[int]) -> None:
        """An answer's own tokens: the next request brings back its text alone."""
        with self._lock:
            self._answers[text] = array("i", ids)
            self._answers.move_to_end(text)
            while len(self._answers) > REMEMBERED_ANSWERS:
                self._answers.popitem(last=False)

    def _chat(self, request: CheckedRequest, messages: list[dict[str, Any]]) -> EncodedPrompt:
        names = dict(request.template_names)
        if self.template.knows_tools:
            names |= {"tools": declared(request.tools.functions) if request.tools else None}
        else:
            messages = spelled_out(messages, request.tools, self.form)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"][-KNOWN:]
        known = {i: ids for i in answers if (ids := self._known(messages[i])) is not None}
        ids = self._checked(self._turns.ids(messages, known.get, names), request.fields["prompt"])
        images = tuple(decoded(url, "image_url") for url in request.images)
        thinks = self._ends_in_thought(ids) and not (request.tools and request.tools.forced)
        return EncodedPrompt(ids, thinks=thinks, images=images)

    def _known(self, message: dict[str, Any]) -> Sequence[int] | None:
        if "tool_calls" in message or "reasoning_content" in message:
            return None
        with self._lock:
            return self._answers.get(message["content"])

    def _checked(self, ids: list[int], field: str) -> list[int]:
        if not ids:
            raise RequestError(400, f"{field!r} is empty: give at least one token", param=field)
        if len(ids) > self._ctx:
            message = f"the prompt has {len(ids)} tokens, this server's context is {self._ctx}: shorten it"
            raise RequestError(400, message, "context_length_exceeded", field)
        if (last := max(ids)) >= self._vocab_size:
            message = f"token id {last} is outside the model's vocabulary of {self._vocab_size}"
            raise RequestError(400, message, param=field)
        return ids

    def _text(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        return self.tokenizer.decode([token for token in prompt if token < self.tokenizer.vocab_size])

    def _ends_in_thought(self, ids: Sequence[int]) -> bool:
        """Whether the template has begun the reasoning."""
        texts = [self.marks.get(i) or self.tokenizer.decode([i]) for i in ids[-LOOKED_BACK:]]
        return "".join(texts).rstrip().endswith(THINK)

    def _special(self, mark: str) -> tuple[int, str] | None:
        """The id of a mark that is a special token."""
        ids = self.tokenizer.encode(mark, bos=False)
        special = [i for i in ids if not self.tokenizer.token_bytes(i)]
        return (special[0], mark) if len(special) == 1 and not self.tokenizer.decode(ids).strip() else None
