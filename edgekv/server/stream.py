"""Server-sent events of one answer, to a client that may read slowly or vanish."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgekv.server.engine import Done, Job, Piece
from edgekv.server.protocol import RequestError
from edgekv.server.shapes import Shape

HEARTBEAT_S = 10.0  # a comment while nothing comes, so that proxies and clients keep waiting
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}


class EventStream(Response):
    """Ends the job when the client is gone, or takes longer than ``timeout_s`` for what was sent."""

    def __init__(self, job: Job, shape: Shape, timeout_s: float) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._job, self._shape, self._timeout_s = job, shape, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._job.cancelled.set()
            for task in (sending, gone):
                task.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)

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
        if (opening := self._shape.first()) is not None:
            yield _line(opening)
        while True:
            try:
                event = await asyncio.wait_for(self._job.events.get(), HEARTBEAT_S)
            except asyncio.TimeoutError:
                yield b": waiting\n\n"
                continue
            if isinstance(event, Piece):
                yield _line(self._shape.piece(event.text))
                continue
            if isinstance(event, Done):
                yield _line(self._shape.last(event.reason))
                if self._job.ask.include_usage:
                    yield _line(self._shape.usage(event.usage))
            elif isinstance(event, RequestError):
                yield _line(event.as_json())
            yield b"data: [DONE]\n\n"
            return


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _line(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
