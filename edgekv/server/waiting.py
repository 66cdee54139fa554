"""Waiting for what an engine's jobs give, whole, for as long as the client is there."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request

from edgekv.errors import EdgeKVError
from edgekv.server.jobs import Channel, EmbeddingVector
from edgekv.server.response_builders import ResponseBuilder


async def unless_gone(request: Request, channel: Channel, work: Any) -> Any:
    """The result of ``work``, or None, and the jobs ended, where the client goes before."""
    gone = asyncio.create_task(_disconnected(request))
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
        event = await channel.events.get()
        if isinstance(event, EdgeKVError):
            raise event
        answers.take(event)
    return answers.whole()


async def embedding_vectors(channel: Channel, n: int) -> list[EmbeddingVector]:
    """The vectors of n texts, in the order in which they come. Raises as `whole_answer`."""
    vectors: list[EmbeddingVector] = []
    while len(vectors) < n:
        event = await channel.events.get()
        if isinstance(event, EdgeKVError):
            raise event
        assert isinstance(event, EmbeddingVector)
        vectors.append(event)
    return vectors


async def _disconnected(request: Request) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(0.2)
