"""A model's chat template: Jinja, run in limits, that writes messages the way the model was trained on."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from edgekv.child import BoundedChild, ChildError
from edgekv.errors import ConfigError, EdgeKVError
from edgekv.files import MAX_FILE_BYTES, read_object, read_text, user_path
from edgekv.tokenizer import Tokenizer

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
PLAIN_STOPS = ("\n\nUser:",)


class ChatTemplate:
    """The template as a function of messages; ``stops`` end an answer beside the model's end-of-text tokens.

    ``given_bos``: encoding its text must add the beginning-of-text token, which the template does not write.
    Raises ConfigError for a template that is no Jinja, EdgeKVError where jinja2 is not installed.
    """

    def __init__(
        self, source: str, tokenizer: Tokenizer, *, stops: Sequence[str] = (), given_bos: bool = False
    ) -> None:
        self.source, self.stops, self.given_bos = source, tuple(stops), given_bos
        bos, eos = tokenizer.bos_id, tokenizer.eos_ids
        self._names = {
            "bos_token": "" if bos is None else tokenizer.piece(bos),
            "eos_token": tokenizer.piece(eos[0]) if eos else "",
        }
        if "invalid" in (answer := self._answer(None)):
            raise ConfigError(
                f"the chat template is no valid Jinja ({answer['invalid']}); give another with `chat_template`"
            )

    @classmethod
    def plain(cls, tokenizer: Tokenizer) -> ChatTemplate:
        """A transcript with "User:" and "Assistant:", for models that bring no template."""
        return cls(PLAIN, tokenizer, stops=PLAIN_STOPS, given_bos=True)

    @classmethod
    def open(cls, tokenizer: Tokenizer, place: pathlib.Path | None, given: str | None = None) -> ChatTemplate:
        """The template in the file ``given``, else that of the tokenizer at ``place``, else the plain one.

        Raises ConfigError for a file that can't be read or is no Jinja.
        """
        source = place and find_template(place) if given is None else read_template(given)
        return cls(source, tokenizer) if source else cls.plain(tokenizer)

    @property
    def is_plain(self) -> bool:
        """Whether it is the transcript of `plain`."""
        return self.source == PLAIN

    @property
    def knows_tools(self) -> bool:
        """Whether it writes tools, which come as the variable `tools`."""
        return "tools" in self.source

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        names: Mapping[str, Any] | None = None,
    ) -> str:
        """The text up to where the next answer begins. Raises EdgeKVError where the template refuses messages.

        names: more variables of the template, such as tools.
        """
        given = {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        answer = self._answer({**(names or {}), **given, **self._names})
        if "text" not in answer:
            reason = answer.get("refused", answer.get("invalid"))
            raise EdgeKVError(f"the chat template refuses these messages: {reason}")
        return answer["text"]

    def _answer(self, names: Mapping[str, Any] | None) -> dict[str, str]:
        """See `environment.rendered`. Our own template needs no limits."""
        if importlib.util.find_spec("jinja2") is None:
            raise EdgeKVError("chat templates need jinja2: pip install 'edgekv[chat]'")
        if self.is_plain:
            from edgekv.chat.environment import rendered

            return rendered(self.source, names)
        return _rendered_apart(self.source, names)


def _rendered_apart(source: str, names: Mapping[str, Any] | None) -> dict[str, str]:
    """Templates are programs from strangers: they run in a process of their own, one for all of them.

    Jinja's sandbox keeps them from files and the network, but not from `'x' * 10**10` or a loop without end.
    """
    global _child
    try:
        request = json.dumps({"source": source, "names": names}).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return {"refused": f"they are no JSON ({error})"}
    with _lock:
        if _child is None or not _child.is_alive:
            _child = BoundedChild("edgekv.chat.environment")
        try:
            answer: dict[str, str] = json.loads(_child.ask(request))
        except ChildError as error:
            return {"refused": str(error)}
    return answer


def find_template(tokenizer: pathlib.Path) -> str | None:
    """The template of a tokenizer (its folder, or a file there), None where there is none.

    It is in chat_template.jinja, or in tokenizer_config.json (of several, the one named default). Raises
    ConfigError for a file that can't be read.
    """
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    try:
        if (folder / "chat_template.jinja").is_file():
            return read_text(folder / "chat_template.jinja")
        if (folder / "tokenizer_config.json").is_file():
            return _declared(read_object(folder / "tokenizer_config.json", MAX_FILE_BYTES).get("chat_template"))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder}: its chat template can't be read ({error}); copy it again") from None
    return None


def read_template(path: str) -> str:
    """The text of a template's file. Raises ConfigError (field chat_template)."""
    try:
        return read_text(user_path(path))
    except ValueError as error:
        raise ConfigError(
            f"chat_template={path!r}: {error}; give a UTF-8 Jinja file",
            field="chat_template",
            value=path,
        ) from None


def _declared(value: Any) -> str | None:
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value}
        value = named.get("default")
    return value if isinstance(value, str) else None
