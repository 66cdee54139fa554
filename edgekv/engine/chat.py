"""Chats: conversations of turns, of which only the tokens that are new since the last turn are computed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Sequence
from typing import Any

import msgspec

from edgekv.checks import Count, Natural, checked
from edgekv.engine.runner import require_room
from edgekv.engine.sampling import SamplingParams
from edgekv.engine.session import Session, Step, Stops
from edgekv.errors import ContextError, SessionError
from edgekv.text import StreamDecoder, Tokenizer
from edgekv.text.template import PLACEHOLDER, ChatEncoder, ChatTemplate
from edgekv.types import LayerProgress, Path
from edgekv.vision.model import Embeddings, ImagesReport, Prompt, place_images, require_places, require_vision

MAX_NEW_TOKENS = 1024


class _Turn(msgspec.Struct):
    role: str
    content: str
    ids: list[Natural] = []
    images: list[str] = []
    dropped: bool = False


class Chat:
    """A chat with a session's model.

    template: the chat template; None: the model's own, or a plain transcript for a model without one.
    system: the system message of a new chat. The history is in the session's memo: a saved session brings it back,
    and `Session.reset` forgets it. Methods that change it raise SessionError while a text is being generated.
    Where the session's `can_slide`, the oldest questions and answers leave a full context, each as a whole.
    """

    @checked()
    def __init__(self, session: Session, template: ChatTemplate | None = None, system: str | None = None) -> None:
        self.session, self._tokenizer = session, session.require_tokenizer()
        self.template = template or ChatTemplate.open(self._tokenizer, session.model.tokenizer_path)
        self._encoder = ChatEncoder(self.template, self._tokenizer)
        self._checked: object = None  # the history that was found valid
        self._images: dict[str, Embeddings] = {}  # the images of the history, by their files
        if system and not self.messages:
            self.messages.append({"role": "system", "content": system})

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The history, oldest first: dicts of role, content, images, an answer's token ids, and dropped.

        Raises SessionError where a session file's is damaged.
        """
        messages: list[dict[str, Any]] = self.session.memo.setdefault("messages", [])
        if messages is not self._checked:
            try:
                msgspec.convert(messages, list[_Turn])
            except msgspec.ValidationError as error:
                raise SessionError(f"the session's history is damaged ({error}): start a new session") from None
            self._checked = messages
        return messages

    @checked()
    def set_system(self, text: str) -> None:
        """Replaces the system message, from the next question on; "" removes it. The chat is then read again."""
        self.session.require_idle()
        self.messages[:] = [message for message in self.messages if message["role"] != "system"]
        if text:
            self.messages.insert(0, {"role": "system", "content": text})

    @checked()
    def ask(
        self,
        text: str,
        *,
        images: Sequence[Path] = (),
        max_new_tokens: Count = MAX_NEW_TOKENS,
        sampling: SamplingParams | None = None,
        stop: Stops = (),
        progress: LayerProgress | None = None,
    ) -> Generator[Step, None, None]:
        """Asks something; returns an iterator of the answer's tokens. Where the caller stops, the answer ends.

        images: files that the message shows, before its text where that has no `<image>` for each. The other
        arguments are those of `Session.generate`. Raises ContextError for a message that does not fit, ImageError
        for a model that takes no images.
        """
        message: dict[str, Any] = {"role": "user", "content": text}
        if images:
            require_vision(self.session.model)
            if PLACEHOLDER not in text:
                message["content"] = f"{PLACEHOLDER}\n" * len(images) + text
            message["images"] = list(map(str, images))
        how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": sampling, "progress": progress}
        return self._answer([*self.messages, message], stop, **how)

    @checked()
    def retry(
        self,
        *,
        max_new_tokens: Count = MAX_NEW_TOKENS,
        sampling: SamplingParams | None = None,
        stop: Stops = (),
        progress: LayerProgress | None = None,
    ) -> Generator[Step, None, None]:
        """Answers the last question again; returns an iterator, whose first token replaces the answer."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise SessionError("there is no answer to try again: ask something first")
        how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": sampling, "progress": progress}
        return self._answer(self.messages[:-1], stop, **how)

    def undo(self) -> str:
        """Takes back the last question with its answer; returns the question. Raises SessionError for none."""
        self.session.require_idle()
        begin = _last_question(self.messages)
        if begin is None:
            raise SessionError("there is no question to take back: ask something first")
        *kept, question = self.messages[: begin + 1]
        before = self._prompt([*kept, {"role": "user", "content": ""}])
        self.session.rewind(self.session.shared_prefix(before))
        self.messages[:] = kept
        return str(question["content"])

    def clear(self) -> None:
        """Forgets all but the system message."""
        system = _system(self.messages)
        self.session.reset()
        self.messages[:] = system

    def _answer(
        self, history: Sequence[dict[str, Any]], stop: Stops, *, max_new_tokens: int, **how: Any
    ) -> Generator[Step, None, None]:
        self.session.require_idle()
        messages = [dict(message) for message in history]  # the chat's from the first step on
        images = self._read_images(messages)
        prompt, room = self._fitting(messages, max_new_tokens)
        stops = *self.template.stops, *((stop,) if isinstance(stop, str) else stop)
        new = self.session.align(prompt)
        steps = self.session.generate(new, stop=stops, max_new_tokens=min(room, max_new_tokens), **how)
        self.session.report().images = images
        return self._collected(messages, steps, ends_full=room < max_new_tokens)

    def _fitting(self, messages: list[dict[str, Any]], max_new_tokens: int) -> tuple[Prompt, int]:
        """Returns the whole prompt, and how many tokens of an answer have room beside the question.

        Drops the oldest turns where prompt and answer are too long together, if they may leave. Raises
        ContextError for a question that does not fit.
        """
        prompt, session, ctx = self._prompt(messages), self.session, self.session.plan.ctx
        if not session.can_slide:
            require_room(_length(prompt), ctx, session.config.max_positions)
        if not session.can_slide or _length(prompt) + max_new_tokens <= ctx:
            return prompt, max_new_tokens
        alone = _length(self._prompt([*_system(messages), *messages[_last_question(messages) or 0 :]]))
        if alone > ctx:
            problem, most = f"the message has {alone} tokens with the system message", session.config.max_positions
            accepted = [f"{alone} to {most}"] if alone <= most else []
            raise ContextError(problem, field="ctx", value=ctx, accepted=accepted, advice="shorten the message")
        if _length(prompt) + min(max_new_tokens, ctx // 4) > ctx:
            prompt = self._shortened(messages)
        return prompt, ctx - alone + 1

    def _shortened(self, messages: list[dict[str, Any]], answer: Sequence[int] = ()) -> Prompt:
        """Drops the oldest turns until half of the context is free, or one is left; returns prompt and answer."""
        prompt = self._prompt(messages)
        while _length(prompt) + len(answer) > self.session.plan.ctx // 2 and _drop_oldest(messages):
            prompt = self._prompt(messages)
        return [*prompt, *answer]

    def _prompt(self, messages: Sequence[dict[str, Any]]) -> Prompt:
        """Returns the prompt with its images. Raises ImageError where it lacks a place for each."""
        ids, files = self._ids(messages), _files(messages)
        if not files:
            return ids
        _, token = require_vision(self.session.model)
        require_places(ids, token, len(files))
        return place_images(ids, token, [self._images[file] for file in files], 0)

    def _read_images(self, messages: Sequence[dict[str, Any]]) -> ImagesReport | None:
        """Reads the images that were not read before; returns a report on them, or None."""
        files = dict.fromkeys(_files(messages))
        self._images = {file: rows for file, rows in self._images.items() if file in files}
        new = [file for file in files if file not in self._images]
        if not new:
            return None
        _, token = require_vision(self.session.model)
        with self.session.exclusive():
            rows, report = self.session.vision.place_images([token] * len(new), new, None)
        self._images |= {file: each for file, each in zip(new, rows, strict=True) if isinstance(each, Embeddings)}
        return report

    def _ids(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        shown = [message for message in messages if not message.get("dropped")]
        return self._encoder.ids(shown, lambda i: shown[i].get("ids"))

    def _collected(
        self, messages: list[dict[str, Any]], steps: Generator[Step, None, None], *, ends_full: bool
    ) -> Generator[Step, None, None]:
        """Passes the steps on, then writes question and answer to the history, if there were any.

        ends_full: whether max_new_tokens is what the context had room for.
        """
        history, ctx = list(self.messages), self.session.plan.ctx
        taken: list[Step] = []
        self.messages[:] = messages
        try:
            with contextlib.closing(steps):
                for step in steps:
                    taken.append(step)
                    if ends_full and step.finish_message == "max_new_tokens":
                        self.session.report().finish_message = full = f"context full ({ctx} tokens)"
                        step = dataclasses.replace(step, finish_message=full)
                    yield step
                    if self.session.can_slide and not step.finish_reason and len(self.session.tokens) > ctx:
                        self.session._runner.replace(self._shortened(messages, [step.token for step in taken]))
        finally:
            with contextlib.suppress(SessionError):  # the session was closed meanwhile
                try:
                    history = [*messages, self._answer_message(taken)] if taken else history
                finally:
                    self.messages[:] = history

    def _answer_message(self, steps: Sequence[Step]) -> dict[str, Any]:
        """Returns the message of an answer, after a rewind to the end of its text."""
        text, tokens = "".join(step.text for step in steps), [step.token for step in steps]
        ids = answer_ids(self._tokenizer, tokens, text)
        self.session.rewind(len(self.session.tokens) - len(tokens) + len(ids))
        return {"role": "assistant", "content": text.strip(), "ids": ids}


def _system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [message for message in messages if message["role"] == "system"]


def _last_question(messages: Sequence[dict[str, Any]]) -> int | None:
    return max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)


def _files(messages: Sequence[dict[str, Any]]) -> list[str]:
    return [file for message in messages if not message.get("dropped") for file in message.get("images", ())]


def _length(prompt: Prompt) -> int:
    return sum(len(piece.rows) if isinstance(piece, Embeddings) else 1 for piece in prompt)


def _drop_oldest(messages: Sequence[dict[str, Any]]) -> bool:
    """Drops the oldest question and its answer; returns False where it is the last one."""
    turns = [i for i, m in enumerate(messages) if m["role"] != "system" and not m.get("dropped")]
    later = [i for i in turns[1:] if messages[i]["role"] == "user"]
    for i in turns:
        if later and i < later[0]:
            messages[i]["dropped"] = True
    return bool(later)


def answer_ids(tokenizer: Tokenizer, generated: Sequence[int], text: str) -> list[int]:
    """Returns the generated tokens that an answer's ``text`` consists of, without its end or a stop string."""
    stream, length = StreamDecoder(tokenizer, at_start=False), 0
    for n, token in enumerate(generated):
        length += len(stream.push(token))
        if token in tokenizer.eos_ids or length > len(text):
            return list(generated[:n])
    return list(generated)
