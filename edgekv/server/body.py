"""A request's body: bytes within the limits, strict JSON of text that can be encoded again."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import Request

from edgekv.server.limits import BodyShare, ServerLimits
from edgekv.server.protocol import RequestError

LEVELS = 128  # of lists and objects in each other
DRAINED = 8  # times the limit are read and dropped: a client that is cut off while it sends reads no answer


async def read_body(request: Request, limits: ServerLimits, body: BodyShare) -> bytearray:
    """Raises RequestError: another type, too large, or too slow."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestError(
            415, "send JSON with the header Content-Type: application/json", "unsupported_media_type"
        )
    try:
        return await asyncio.wait_for(_bytes(request, limits.max_request, body), limits.client_timeout_s)
    except asyncio.TimeoutError:
        seconds = limits.client_timeout_s
        raise RequestError(408, f"the request was not whole after {seconds:g} s", "request_timeout") from None


async def _bytes(request: Request, limit: int, body: BodyShare) -> bytearray:
    data, received = bytearray(), 0
    async for piece in request.stream():
        received += len(piece)
        if received > DRAINED * limit:
            break
        if received <= limit:
            body.resize(received)
            data += piece
    if received > limit:
        raise RequestError(413, f"the request has more than {limit} bytes: shorten it", "request_too_large")
    return data


def parse_json(data: bytes | bytearray) -> Any:
    """A body's value; of a key that an object has twice the last one, as Python's json has it.

    Raises RequestError (400) for what is no JSON (NaN and Infinity are none), holds half of a surrogate pair, or
    is deeper than LEVELS: whatever writes or walks it later can do so by recursion.
    """
    try:
        text = data.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
        if data.count(b"[") + data.count(b"{") > LEVELS:
            _require_levels(value)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).encode(errors="replace").decode().split())[:200]
        raise RequestError(400, f"the body is not valid JSON ({reason})", "invalid_json") from None
    return value


def _require_levels(value: Any) -> None:
    level = [value]
    for _ in range(LEVELS):
        lists = [each.values() if isinstance(each, dict) else each for each in level]
        level = [item for each in lists for item in each if isinstance(item, (dict, list))]
        if not level:
            return
    raise ValueError(f"more than {LEVELS} lists and objects within each other")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")
