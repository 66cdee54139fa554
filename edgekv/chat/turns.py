"""Messages to token ids with the answers' own tokens: a text has many encodings, and the cache holds one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edgekv.chat.template import ChatTemplate, Message
from edgekv.tokenizer import Tokenizer, as_text
from edgekv.vision.prompt import PLACEHOLDER, without_places

MARK = "\ue000{}\ue001"  # stands for an answer: private characters that no template and no message has
Known = Callable[[int], Sequence[int] | None]  # the ids of message i as they were generated, if it was


class TurnEncoder:
    """The template's text in pieces around the answers, each piece encoded by itself."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self.template, self._tokenizer = template, tokenizer
        self._latest: dict[tuple[str, bool], list[int]] = {}  # the pieces of the latest conversation: it goes on
        specials = {tokenizer.piece(i): i for i in (tokenizer.bos_id, *tokenizer.eos_ids) if i is not None}
        self._specials = {*tokenizer.special_texts, *specials} - {PLACEHOLDER, ""}
        self._unreadable = {  # that the tokenizer does not find in a text by itself
            name: i for name, i in specials.items() if name and tokenizer.encode(name, bos=False) != [i]
        }

    def ids(self, messages: Sequence[Message], known: Known, names: Mapping[str, Any] | None = None) -> list[int]:
        """Ids of the conversation up to where the next answer begins. names: more variables of the template.

        What a message writes as the text of a special token is text, but for `<image>` where it has "images".
        Where the template does more with an answer than to print it (drops its reasoning, say), the whole is
        encoded from its text. Raises EdgeKVError where the template refuses the messages.
        """
        messages = [self._plain(message) for message in messages]
        answers = {i: ids for i in range(len(messages)) if (ids := known(i)) is not None}
        pieces = self._around(messages, list(answers), names) if answers else None
        if pieces is None:
            pieces, answers = [self.template.render(messages, names=names)], {}
        keys = [(piece, i == 0 and self.template.given_bos) for i, piece in enumerate(pieces)]
        self._latest = encoded = {key: self._latest.get(key) or self._encode(*key) for key in keys}
        ids = list(encoded[keys[0]])
        for answer, key in zip(answers.values(), keys[1:], strict=True):
            ids += [*answer, *encoded[key]]
        return ids

    def _plain(self, message: Message) -> Message:
        """The message with special tokens in its content as text; an answer may have them."""
        content = message.get("content")
        if message["role"] == "assistant" or not isinstance(content, str):
            return message
        content = as_text(content, self._specials)
        return {
            **message,
            "content": content if message.get("images") else without_places(content, self._tokenizer),
        }

    def _around(
        self, messages: Sequence[Message], answers: Sequence[int], names: Mapping[str, Any] | None
    ) -> list[str] | None:
        """The text before, between and after the answers (indices of messages), or None where it depends on them.

        Before an answer stands what was its prompt: templates put other white space there later.
        """
        marked = [{**m, "content": MARK.format(i)} if i in answers else m for i, m in enumerate(messages)]
        whole = self.template.render(marked, names=names)
        if any(whole.count(MARK.format(i)) != 1 for i in answers):
            return None
        filled = whole
        for i in answers:
            filled = filled.replace(MARK.format(i), messages[i]["content"])
        if filled.split() != self.template.render(messages, names=names).split():
            return None
        pieces = _split(whole)
        for k, i in enumerate(answers):
            prompt = _split(self.template.render(marked[:i], names=names))[-1]
            if prompt.split() != pieces[k].split():
                return None
            pieces[k] = prompt
        return pieces

    def _encode(self, text: str, bos: bool) -> list[int]:
        if not self._unreadable:
            return self._tokenizer.encode(text, bos=bos)
        ids: list[int] = []
        for piece in re.split(f"({'|'.join(map(re.escape, self._unreadable))})", text):
            if piece in self._unreadable:
                ids.append(self._unreadable[piece])
            elif piece:
                ids += self._tokenizer.encode(piece, bos=bos and not ids)
        return ids


def _split(text: str) -> list[str]:
    """The text around all marks."""
    return re.split(MARK.format(r"\d+"), text)
