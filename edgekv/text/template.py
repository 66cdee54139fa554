"""Chat templates (Jinja, run in a bounded process), and the encoding of chats with the answers' own token ids.

A text has many encodings and the cache holds one of them, so generated tokens are not encoded again.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edgekv.child import BoundedChild, ChildError
from edgekv.errors import ConfigError, EdgeKVError
from edgekv.files import MAX_FILE_BYTES, read_object, read_text, user_path
from edgekv.text.tokenizer import Tokenizer, as_text

Message = Mapping[str, Any]
_child: BoundedChild | None = None
_lock = threading.Lock()

PLAIN = """\
{%- for message in messages -%}
{{ "" if loop.first else "\n\n" }}
{%- if message.role == "system" %}{{ message.content }}
{%- else %}{{ "User: " if message.role == "user" else "Assistant: " }}{{ message.content }}{% endif -%}
{%- endfor -%}
{{- "\n\nAssistant:" if add_generation_prompt }}"""
PLACEHOLDER = "<image>"
MARK = "\ue000{}\ue001"  # stands for an answer: private characters that no template and no message has
GeneratedIds = Callable[[int], Sequence[int] | None]
"""Returns the token ids of message i as they were generated; None: it was not generated."""
PLAIN_STOPS = ("\n\nUser:",)


class ChatTemplate:
    """A chat template, which renders messages as text.

    stops: texts that end an answer, beside the model's end-of-text tokens. given_bos: whether encoding the text
    must add the beginning-of-text token, which the template does not write.
    Raises ConfigError for a template that is no Jinja, EdgeKVError where jinja2 is not installed.
    """

    def __init__(
        self, source: str, tokenizer: Tokenizer, *, stops: Sequence[str] = (), given_bos: bool = False
    ) -> None:
        self.source, self.stops, self.given_bos = source, tuple(stops), given_bos
        self.is_plain, self.knows_tools = source == PLAIN, "tools" in source  # the variable that has them
        bos, eos = tokenizer.bos_id, tokenizer.eos_ids
        self._names = {
            "bos_token": "" if bos is None else tokenizer.piece(bos),
            "eos_token": tokenizer.piece(eos[0]) if eos else "",
        }
        if "invalid" in (answer := self._answer(None)):
            raise ConfigError(
                f"the chat template is no valid Jinja ({answer['invalid']})", advice="give another {chat_template}"
            )

    @classmethod
    def plain(cls, tokenizer: Tokenizer) -> ChatTemplate:
        """Returns the template of a transcript with "User:" and "Assistant:", for models without one."""
        return cls(PLAIN, tokenizer, stops=PLAIN_STOPS, given_bos=True)

    @staticmethod
    def read(given: str) -> str:
        """Returns the text of a template's file. Raises ConfigError for one that can't be read."""
        try:
            return read_text(user_path(given))
        except ValueError as error:
            accepted = ["a UTF-8 Jinja file"]
            raise ConfigError(str(error), field="chat_template", value=given, accepted=accepted) from None

    @classmethod
    def open(cls, tokenizer: Tokenizer, path: pathlib.Path | None, given: str | None = None) -> ChatTemplate:
        """Opens the template in the file ``given``, else that of the tokenizer at ``path``, else the plain one.

        Raises ConfigError for a file that can't be read or is no Jinja.
        """
        source = path and find_template(path) if given is None else cls.read(given)
        return cls(source, tokenizer) if source else cls.plain(tokenizer)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        names: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders messages, up to where the next answer begins. Raises EdgeKVError where they are refused.

        names: more variables of the template, such as tools.
        """
        given = {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        answer = self._answer({**(names or {}), **given, **self._names})
        if "text" not in answer:
            reason = answer.get("refused", answer.get("invalid"))
            raise EdgeKVError(f"the chat template refuses these messages: {reason}")
        return answer["text"]

    def _answer(self, names: Mapping[str, Any] | None) -> dict[str, str]:
        """Runs `sandbox.render`: in a bounded process, except for our own template.

        Jinja's sandbox does not keep strangers' programs from `'x' * 10**10`.
        """
        global _child
        if importlib.util.find_spec("jinja2") is None:
            raise EdgeKVError("chat templates need jinja2: pip install 'edgekv[chat]'")
        if self.is_plain:
            from edgekv.text.sandbox import render

            return render(self.source, names)
        try:
            request = json.dumps({"source": self.source, "names": names}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            return {"refused": f"they are no JSON ({error})"}
        with _lock:
            if _child is None or not _child.is_alive:
                _child = BoundedChild("edgekv.text.sandbox")
            try:
                result: dict[str, str] = json.loads(_child.ask(request))
                return result
            except ChildError as error:
                return {"refused": str(error)}


def find_template(tokenizer: pathlib.Path) -> str | None:
    """Returns the template in the chat_template.jinja or tokenizer_config.json of a tokenizer's folder, or None.

    Of several, the one named default. Raises ConfigError for a file that can't be read.
    """
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    try:
        if (folder / "chat_template.jinja").is_file():
            return read_text(folder / "chat_template.jinja")
        if not (folder / "tokenizer_config.json").is_file():
            return None
        value = read_object(folder / "tokenizer_config.json", MAX_FILE_BYTES).get("chat_template")
        if isinstance(value, list):
            value = {entry["name"]: entry["template"] for entry in value}.get("default")
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder}: its chat template can't be read ({error}); copy it again") from None
    return value if isinstance(value, str) else None


class ChatEncoder:
    """Encodes chats: the template's text in pieces around the answers, each piece by itself."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self.template, self._tokenizer = template, tokenizer
        self._latest: dict[tuple[str, bool], list[int]] = {}  # the pieces of the latest conversation: it goes on
        specials = {tokenizer.piece(i): i for i in (tokenizer.bos_id, *tokenizer.eos_ids) if i is not None}
        self._specials = {*tokenizer.special_texts, *specials} - {PLACEHOLDER, ""}
        self._unreadable = {  # special tokens that the tokenizer does not find in a text
            name: i for name, i in specials.items() if name and tokenizer.encode(name, bos=False) != [i]
        }

    def ids(
        self, messages: Sequence[Message], generated_ids: GeneratedIds, names: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Encodes a chat, up to where the next answer begins. names: more variables of the template.

        A special token's text in a message is text, except for `<image>` in one with "images". Where the template
        changes an answer (drops its reasoning, say), the whole chat is encoded from its text. Raises EdgeKVError
        where the template refuses the messages.
        """
        messages = [self._without_specials(message) for message in messages]
        names = self._names_as_text(names)
        answers = {i: ids for i in range(len(messages)) if (ids := generated_ids(i)) is not None}
        pieces = self._around(messages, list(answers), names) if answers else None
        if pieces is None:
            pieces, answers = [self.template.render(messages, names=names)], {}
        keys = [(piece, i == 0 and self.template.given_bos) for i, piece in enumerate(pieces)]
        self._latest = encoded = {key: self._latest.get(key) or self._encode(*key) for key in keys}
        ids = list(encoded[keys[0]])
        for answer, key in zip(answers.values(), keys[1:], strict=True):
            ids += [*answer, *encoded[key]]
        return ids

    def _without_specials(self, message: Message) -> Message:
        """Returns a message with special tokens in its content as text; an answer may have them."""
        content = message.get("content")
        if message["role"] == "assistant" or not isinstance(content, str):
            return message
        content = as_text(content, self._specials)
        if not message.get("images"):
            content = without_places(content, self._tokenizer)
        return {**message, "content": content}

    def _names_as_text(self, value: Any) -> Any:
        if isinstance(value, str):
            return as_text(value, self._specials)
        if isinstance(value, Mapping):
            return {self._names_as_text(key): self._names_as_text(item) for key, item in value.items()}
        return [self._names_as_text(item) for item in value] if isinstance(value, list) else value

    def _around(
        self, messages: Sequence[Message], answers: Sequence[int], names: Mapping[str, Any] | None
    ) -> list[str] | None:
        """Returns the text before, between and after answers (message indices); None: it depends on them.

        The text before an answer is its prompt, as templates put other white space there later.
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
    return re.split(MARK.format(r"\d+"), text)


def without_places(text: str, tokenizer: Tokenizer) -> str:
    """Returns the text of a prompt without images, in which `<image>` is text."""
    if PLACEHOLDER not in text:
        return text
    pieces = map(tokenizer.piece, tokenizer.encode(PLACEHOLDER, bos=False))
    return as_text(text, [PLACEHOLDER]) if PLACEHOLDER in pieces else text
