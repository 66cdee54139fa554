"""What the endpoints ask of the engine, and what comes back to them, event by event."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from edgekv.errors import EdgeKVError
from edgekv.server.checked_request import CheckedRequest
from edgekv.server.protocol import EMBEDDING_FIELDS
from edgekv.session.finish import FinishReason
from edgekv.session.logprobs import TokenLogprob


@dataclasses.dataclass(frozen=True)
class Usage:
    """Tokens of one answer; ``cached`` of the prompt's were not computed again.

    reasoning: those of the completion that are.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0

    def __add__(self, other: Usage) -> Usage:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Usage(*(a + b for a, b in pairs))

    def as_json(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


@dataclasses.dataclass(frozen=True)
class Piece:
    """Text that can be shown, of the answer ``index``, made of ``n_tokens`` of its own.

    logprobs: of its tokens, if asked for; None for the first of an echoed prompt, which follows nothing.
    """

    index: int
    text: str
    logprobs: Sequence[TokenLogprob | None] = ()
    timings: dict[str, Any] | None = None
    n_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class PromptProgress:
    """How far the prompt of the answer ``index`` is read."""

    index: int
    values: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class AnswerEnd:
    """The end of the answer ``index``: OpenAI's finish reason."""

    index: int
    reason: FinishReason
    usage: Usage
    timings: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class EmbeddingVector:
    """The text ``index`` as a vector."""

    index: int
    values: Sequence[float]
    n_tokens: int


Event = Piece | PromptProgress | AnswerEnd | EmbeddingVector | EdgeKVError


class Cancelled(Exception):
    """The client is gone."""


class Channel:
    """The way back to the client of one request: its events arrive in the event loop that made it."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.cancelled = threading.Event()
        self._loop = asyncio.get_running_loop()

    def emit(self, event: Event) -> None:
        """Hands an event to the event loop; from any thread. An exception is the last one."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)

    def check(self, *progress: object) -> None:
        """Raises Cancelled where the client is gone; a callback of progress."""
        if self.cancelled.is_set():
            raise Cancelled


@dataclasses.dataclass(frozen=True)
class EncodedPrompt:
    """A prompt's token ids.

    text: what an echo brings back. thinks: the answer begins within the model's reasoning. images: the bytes of
    files, in the order of their places among the ids.
    """

    ids: list[int]
    text: str = ""
    thinks: bool = False
    images: tuple[bytes, ...] = ()


@dataclasses.dataclass(frozen=True)
class Job:
    """One answer of a request: the ``choice``-th to its prompt, the ``index``-th of all.

    lora: the name of the one beside the weights; None: without.
    """

    channel: Channel
    request: CheckedRequest
    prompt: EncodedPrompt
    index: int = 0
    choice: int = 0
    lora: str | None = None

    @property
    def fields(self) -> Mapping[str, str]:
        """As `CheckedRequest.fields`."""
        return self.request.fields


@dataclasses.dataclass(frozen=True)
class EmbeddingJob:
    """The ``index``-th text of a request for vectors. lora: as a `Job`'s."""

    channel: Channel
    ids: list[int]
    index: int = 0
    lora: str | None = None
    fields: ClassVar[Mapping[str, str]] = EMBEDDING_FIELDS


def jobs_of(
    channel: Channel, request: CheckedRequest, prompts: Sequence[EncodedPrompt], lora: str | None = None
) -> list[Job]:
    """n answers to each prompt, in OpenAI's order."""
    return [
        Job(channel, request, prompt, i * request.n + choice, choice, lora)
        for i, prompt in enumerate(prompts)
        for choice in range(request.n)
    ]
