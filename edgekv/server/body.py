"""A request's body: bytes within the limits, strict JSON of text that can be encoded again."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import Request

from edgekv.server.limits import BodyShare, ServerLimits
from edgekv.server.protocol import RequestError

DRAINED = 8  # times the limit are read and dropped: a client that is cut off while it sends reads no answer


async def read_json(request: Request, limits: ServerLimits, body: BodyShare) -> Any:
    """Raises RequestError: another type, too large, too slow, or no JSON."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise RequestError(
            415, "send JSON with the header Content-Type: application/json", "unsupported_media_type"
        )
    try:
        data = await asyncio.wait_for(_bytes(request, limits.max_request, body), limits.client_timeout_s)
    except asyncio.TimeoutError:
        seconds = limits.client_timeout_s
        raise RequestError(408, f"the request was not whole after {seconds:g} s", "request_timeout") from None
    return parse_json(data)


async def _bytes(request: Request, limit: int, body: BodyShare) -> bytearray:
    data, received = bytearray(), 0
    async for piece in request.stream():
        received += len(piece)
        if received > DRAINED * limit:
            break
        if received <= limit:
            body.grow(received)
            data += piece
    if received > limit:
        raise RequestError(413, f"the request has more than {limit} bytes: shorten it", "request_too_large")
    return data


def parse_json(data: bytes | bytearray) -> Any:
    """A body's value; of a key that an object has twice the last one, as Python's json has it.

    Raises RequestError (400) for what is no JSON (NaN and Infinity are none), or holds half of a surrogate pair.
    """
    try:
        text = data.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).encode(errors="replace").decode().split())[:200]
        raise RequestError(400, f"the body is not valid JSON ({reason})", "invalid_json") from None
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")
