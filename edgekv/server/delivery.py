"""What an engine's jobs give, to the client for as long as it is there: in one piece, or as server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgekv.errors import EdgeKVError
from edgekv.server.jobs import Channel, EmbeddingVector
from edgekv.server.protocol import FAILED, RequestError
from edgekv.server.response_builders import ResponseBuilder

LOG = logging.getLogger("edgekv.server")
HEARTBEAT_S = 10.0  # a comment while nothing comes, so that proxies and clients keep waiting
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}


async def unless_gone(receive: Receive, channel: Channel, work: Any) -> Any:
    """The result of ``work``, or None, and the jobs ended, where the client goes before."""
    gone = asyncio.create_task(_until_gone(receive))
    working = asyncio.create_task(work)
    try:
        await asyncio.wait((gone, working), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        channel.cancelled.set()
        gone.cancel()
        working.cancel()


async def whole_answer(channel: Channel, answers: ResponseBuilder) -> dict[str, Any]:
    """What ``answers`` makes of all events. Raises the EdgeKVError that ended one."""
    while not answers.is_done:
        answers.take(await _event(channel))
    return answers.whole()


async def embedding_vectors(channel: Channel, n: int) -> list[EmbeddingVector]:
    """The vectors of n texts, in the order in which they come. Raises as `whole_answer`."""
    vectors: list[EmbeddingVector] = []
    while len(vectors) < n:
        event = await _event(channel)
        assert isinstance(event, EmbeddingVector)
        vectors.append(event)
    return vectors


async def _event(channel: Channel) -> Any:
    """The next event that is no error: errors are raised."""
    event = await channel.events.get()
    if isinstance(event, EdgeKVError):
        raise event
    return event


class EventStream(Response):
    """Ends the jobs when the client is gone, or takes longer than ``timeout_s`` for what was sent.

    on_end: called once nothing more is sent.
    """

    def __init__(
        self,
        channel: Channel,
        answers: ResponseBuilder,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(headers={**HEADERS, **(headers or {})})
        del self.headers["content-length"]
        self._channel, self._answers, self._timeout_s, self._on_end = channel, answers, timeout_s, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._channel.cancelled.set()
            for task in (sending, gone):
                task.cancel()
            sent, _ = await asyncio.gather(sending, gone, return_exceptions=True)
            of_client = OSError, asyncio.TimeoutError  # it is gone, or reads too slowly
            if isinstance(sent, Exception) and not isinstance(sent, of_client):
                LOG.error("a stream failed", exc_info=sent)
            self._on_end()

    async def _send(self, send: Send) -> None:
        events = self._lines()
        first = await anext(events)
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await send(start)
        await self._give(send, first)
        async for line in events:
            await self._give(send, line)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _give(self, send: Send, line: bytes) -> None:
        await asyncio.wait_for(
            send({"type": "http.response.body", "body": line, "more_body": True}), self._timeout_s
        )

    async def _lines(self) -> AsyncIterator[bytes]:
        """All that is sent. What fails while it is built is logged, and told at the end."""
        answers = self._answers
        try:
            for value in answers.opening():
                yield answers.encoded(value)
            while not answers.is_done:
                try:
                    event = await asyncio.wait_for(self._channel.events.get(), HEARTBEAT_S)
                except asyncio.TimeoutError:
                    yield b": waiting\n\n"
                    continue
                if isinstance(event, EdgeKVError):
                    values = answers.failed(event) if isinstance(event, RequestError) else []
                    break
                for value in answers.take(event):
                    yield answers.encoded(value)
            else:
                values = answers.closing()
        except Exception:
            LOG.exception("a stream failed")
            values = answers.failed(RequestError(500, FAILED, "internal_error"))
        for value in values:
            yield answers.encoded(value)
        if answers.last_line:
            yield answers.last_line


async def _until_gone(receive: Receive) -> None:
    """Of a request whose body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass
