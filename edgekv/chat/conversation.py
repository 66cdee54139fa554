"""A conversation of turns: only the tokens that are new since the last turn are computed."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

from edgekv.chat.template import ChatTemplate
from edgekv.chat.turns import TurnEncoder
from edgekv.errors import SessionError
from edgekv.session.generation import Step
from edgekv.session.sampling_params import SamplingParams
from edgekv.session.session import Session
from edgekv.tokenizer import StreamDecoder, Tokenizer
from edgekv.types import LayerProgress
from edgekv.vision import require_vision
from edgekv.vision.prompt import PLACEHOLDER, Embeddings

MAX_NEW_TOKENS = 1024


class Chat:
    """Turns with a session's model. The history is in the session's memo: a saved session brings it back."""

    def __init__(self, session: Session, template: ChatTemplate, system: str | None = None) -> None:
        self.session, self.template = session, template
        self._tokenizer = session.require_tokenizer()
        self._encoder = TurnEncoder(template, self._tokenizer)
        if system and not self.messages:
            self.messages.append({"role": "system", "content": system})

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The history, oldest first: role, content, of answers the ids of their tokens, and what was dropped."""
        messages: list[dict[str, Any]] = self.session.state.memo.setdefault("messages", [])
        return messages

    def set_system(self, text: str) -> None:
        """Another system message from the next question on; an empty one is none. The cache is read anew then."""
        self.messages[:] = [message for message in self.messages if message["role"] != "system"]
        if text:
            self.messages.insert(0, {"role": "system", "content": text})

    def ask(
        self,
        text: str,
        *,
        images: Sequence[str] = (),
        max_new_tokens: int = MAX_NEW_TOKENS,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        progress: LayerProgress | None = None,
    ) -> Generator[Step, None, None]:
        """The answer to a message, token by token. What has come when the caller stops is the answer.

        images: files that the message shows; where its text has no `<image>` for each, they come before it. The
        turns from the first image on are computed again at each question. A message without any answer is
        forgotten. Raises ContextError when it does not fit, ImageError for a model that takes no images.
        """
        message: dict[str, Any] = {"role": "user", "content": text}
        if images:
            require_vision(self.session.model)
            if PLACEHOLDER not in text:
                message["content"] = f"{PLACEHOLDER}\n" * len(images) + text
            message["images"] = list(images)
        return self._answer([*self.messages, message], max_new_tokens, sampling, stop, progress)

    def retry(
        self,
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        progress: LayerProgress | None = None,
    ) -> Generator[Step, None, None]:
        """Another answer in place of the last one, which stays until the first token of the other comes."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise SessionError("there is no answer to try again: ask something first")
        return self._answer(self.messages[:-1], max_new_tokens, sampling, stop, progress)

    def clear(self) -> None:
        """Forgets all but the system message."""
        self.messages[:] = [message for message in self.messages if message["role"] == "system"]
        self.session.reset()

    def _answer(
        self,
        history: Sequence[dict[str, Any]],
        max_new_tokens: int,
        sampling: SamplingParams | None,
        stop: Sequence[str],
        progress: LayerProgress | None,
    ) -> Generator[Step, None, None]:
        messages = [dict(message) for message in history]  # the chat's from the first step on
        new = self.session.align(self._fitting(messages))
        steps = self.session.generate(
            new,
            images=self._images(messages, new),
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=(*self.template.stops, *stop),
            progress=progress,
        )
        return self._collected(messages, steps)

    def _fitting(self, messages: list[dict[str, Any]]) -> list[int]:
        """Ids of the conversation; where it outgrew the context, and may slide, without its oldest turns."""
        ids, ctx = self._ids(messages), self.session.plan.ctx
        if len(ids) >= ctx and self.session.runner.context_shift.makes_room:
            while len(ids) > ctx // 2 and _drop_oldest(messages):
                ids = self._ids(messages)
        return ids

    def _ids(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        shown = [message for message in messages if not message.get("dropped")]
        return self._encoder.ids(shown, lambda i: shown[i].get("ids"))

    def _images(self, messages: Sequence[dict[str, Any]], new: Sequence[int | Embeddings]) -> list[str]:
        """The files whose places are among the new ids: the latest of those that are shown."""
        shown = [m for m in messages if not m.get("dropped")]
        files = [str(file) for message in shown for file in message.get("images", ())]
        places = sum(token == self.session.model.image_token for token in new) if files else 0
        return files[len(files) - places :]

    def _collected(
        self, messages: list[dict[str, Any]], steps: Generator[Step, None, None]
    ) -> Generator[Step, None, None]:
        """Passes the steps on and writes question and answer into the history; without any it stays as it is."""
        before = list(self.messages)
        made: list[Step] = []
        self.messages[:] = messages
        try:
            with contextlib.closing(steps):
                for step in steps:
                    made.append(step)
                    yield step
        finally:
            if made:
                self._record(made)
            else:
                self.messages[:] = before

    def _record(self, made: Sequence[Step]) -> None:
        text, tokens = "".join(step.text for step in made), [step.token for step in made]
        ids = answer_ids(self._tokenizer, tokens, text)
        self.session.rewind(len(self.session.tokens) - len(tokens) + len(ids))
        self.messages.append({"role": "assistant", "content": text.strip(), "ids": ids})


def _drop_oldest(messages: Sequence[dict[str, Any]]) -> bool:
    """Leaves out the oldest question and its answer, unless it is the last one."""
    turns = [i for i, m in enumerate(messages) if m["role"] != "system" and not m.get("dropped")]
    later = [i for i in turns[1:] if messages[i]["role"] == "user"]
    for i in turns:
        if later and i < later[0]:
            messages[i]["dropped"] = True
    return bool(later)


def answer_ids(tokenizer: Tokenizer, generated: Sequence[int], text: str) -> list[int]:
    """The tokens of an answer's ``text`` among those generated: without its end, or a stop string."""
    stream, length = StreamDecoder(tokenizer, at_start=False), 0
    for n, token in enumerate(generated):
        length += len(stream.push(token))
        if token in tokenizer.eos_ids or length > len(text):
            return list(generated[:n])
    return list(generated)
