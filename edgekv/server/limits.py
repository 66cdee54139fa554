"""Limits on what clients can cost: connections, time per request, memory for bodies, lines in the log."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import math
import resource
import socket
import time
from collections.abc import Callable
from traceback import walk_tb
from typing import Any

import uvicorn
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgekv.server.requests import RequestError

LOG = logging.getLogger("edgekv.server")
UNCOUNTED = 64 << 10  # bytes of a body that are not counted
LOGS = ("asyncio", "uvicorn.error", "edgekv.server")
MAX_DRAIN = 8  # times the limit that are read and discarded: a client that is still sending reads no answer
LOG_INTERVAL_S = 60.0  # between two lines of the same kind
ENDING_S = 0.3  # for the last events of answers when the server ends
GRACE_S = 2.0  # for the answer that says a request came too slowly


@dataclasses.dataclass(frozen=True)
class ServerLimits:
    """The limits of a request's bytes, of the seconds to send it, and of open connections.

    max_bodies: bytes in memory of all requests that are being read, waiting or answered.
    """

    max_request: int = 1 << 20
    client_timeout_s: float = 30.0
    max_connections: int = 512
    max_bodies: int = 64 << 20


class BodyMemory:
    """The memory for bodies of requests. UNCOUNTED bytes of each are free, so that small ones always fit."""

    def __init__(self, max_bytes: int) -> None:
        self.free = self.max_bytes = max_bytes


class BodyShare:
    """The share of one request in `BodyMemory`, until it is closed."""

    def __init__(self, bodies: BodyMemory) -> None:
        self._bodies, self.taken, self._parsed = bodies, 0, 0

    def resize(self, nbytes: int) -> None:
        """Changes the share to ``nbytes``. Raises RequestError: 503 if that is too much now, 413 if always."""
        counted = max(0, nbytes - UNCOUNTED)
        if counted > self._bodies.max_bytes:
            message = f"the request and its answers take {nbytes} bytes of memory"
            raise RequestError(413, f"{message}: shorten it, or ask for fewer of them", "request_too_large")
        if counted - self.taken > self._bodies.free:
            raise RequestError(503, "too many large requests at once: try again later", "overloaded")
        self._bodies.free -= counted - self.taken
        self.taken = counted

    def parse(self, data: bytes | bytearray) -> None:
        """Adds an upper bound of the body's parsed JSON to its bytes. Raises as `resize`."""
        text = len(data) * (1 if data.isascii() and b"\\u" not in data else 4)
        weights = ((b",", 72), (b"[", 104), (b"{", 96), (b":", 160))
        self._parsed = text + sum(nbytes * data.count(mark) for mark, nbytes in weights)
        self.resize(len(data) + self._parsed)

    def keep_parsed(self, n_ids: int, nbytes: int) -> None:
        """Changes the share to the parsed JSON, token ids, and ``nbytes`` of other data. Raises as `resize`."""
        self.resize(self._parsed + 40 * n_ids + nbytes)

    def close(self) -> None:
        """Gives the share back."""
        self._bodies.free += self.taken


async def read_body(request: Request, limits: ServerLimits, body: BodyShare) -> bytearray:
    """Returns a request's body. Raises RequestError if it is no JSON, too large or too slow."""
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "application/json":  # what others are, any page may send
        message = f"the header Content-Type is {given[:60]!r}; send Content-Type: application/json"
        raise RequestError(415, message, "unsupported_media_type")
    limit, seconds = limits.max_request, limits.client_timeout_s

    async def receive() -> bytearray:
        data, n_received = bytearray(), 0
        async for chunk in request.stream():
            n_received += len(chunk)
            if n_received > MAX_DRAIN * limit:
                break
            if n_received <= limit:
                body.resize(n_received)
                data += chunk
        if n_received > limit:
            message = f"the request has more than {limit} bytes: shorten it"
            raise RequestError(413, message, "request_too_large")
        return data

    try:
        return await asyncio.wait_for(receive(), seconds)
    except asyncio.TimeoutError:
        message = f"the request was not whole after {seconds:g} s"
        raise RequestError(408, message, "request_timeout") from None


class BoundedProtocol(H11Protocol):
    """A connection with a timeout for each request to arrive, and for the client to read its answer.

    awaited: the connections whose next request is incomplete, the oldest first.
    """

    def __init__(self, timeout_s: float, max_open: int, awaited: dict[BoundedProtocol, None], **more: Any) -> None:
        super().__init__(**more)
        self._timeout_s, self._max_open, self._awaited = timeout_s, max_open, awaited
        self._request_due_s = self._reading_due_s = math.inf

    @property
    def is_overdue(self) -> bool:
        """Whether a timeout has passed."""
        return time.monotonic() > min(self._request_due_s, self._reading_due_s)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by asyncio: closes the connection that has been silent the longest, if too many are open."""
        super().connection_made(transport)
        self._await_request()
        if len(self.connections) > self._max_open:
            LOG.warning(
                "%d connections: those that have sent no request for the longest are closed", self._max_open
            )
            oldest = next(iter(self._awaited))
            del self._awaited[oldest]
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio: forgets the connection."""
        self._awaited.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio: starts the timeout at a request's first bytes, and ends it at the last."""
        super().data_received(data)
        self._update()
        if self in self._awaited and self._request_due_s == math.inf:
            self._await_request()

    def on_response_complete(self) -> None:
        """Called by uvicorn: awaits the next request."""
        super().on_response_complete()
        self._update()

    def pause_writing(self) -> None:
        """Called by asyncio when the client reads too slowly: starts the timeout to go on."""
        super().pause_writing()
        self._reading_due_s = min(self._reading_due_s, time.monotonic() + self._timeout_s)

    def resume_writing(self) -> None:
        """Called by asyncio when the client has read: ends the timeout."""
        super().resume_writing()
        self._reading_due_s = math.inf

    def _await_request(self) -> None:
        self._awaited.setdefault(self)
        # The endpoints answer 408 after the timeout; this one ends requests that reach no endpoint.
        self._request_due_s = time.monotonic() + self._timeout_s + GRACE_S

    def _update(self) -> None:
        """Notes whether a request, or the rest of one, is awaited."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and not cycle.more_body:
            self._request_due_s = math.inf
            self._awaited.pop(self, None)
        elif not self.transport.is_closing():
            self._awaited.setdefault(self)


class BoundedServer(uvicorn.Server):
    """A uvicorn server with `ServerLimits` that shuts down quickly. stop: the function that ends all answers."""

    def __init__(self, app: Any, limits: ServerLimits, stop: Callable[[], object] = lambda: None) -> None:
        self._stop = stop
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        descriptors = soft if soft != resource.RLIM_INFINITY else 1 << 20
        max_open = min(limits.max_connections, descriptors // 2)
        super().__init__(
            uvicorn.Config(
                app,
                http=functools.partial(BoundedProtocol, limits.client_timeout_s, max_open, {}),  # type: ignore[arg-type]
                ws="none",
                log_level="warning",
                access_log=False,
                use_colors=False,
                # All of the backlog are accepted before one is checked: more could exhaust the file descriptors.
                backlog=min(256, descriptors // 4),
                timeout_keep_alive=5,
                timeout_graceful_shutdown=5,
                server_header=False,
            )
        )
        for name in LOGS:
            logging.getLogger(name).addFilter(LogLimit())

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves on listening sockets, which it takes over and closes."""
        # With this protocol asyncio sets TCP_NODELAY: else an answer's end waits 40 ms for an acknowledgement.
        tcp = socket.IPPROTO_TCP
        super().run([socket.socket(s.family, s.type, tcp, fileno=s.detach()) for s in sockets or ()])

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second: closes connections whose timeout has passed."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, BoundedProtocol) and connection.is_overdue:
                connection.transport.abort()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn: ends all answers, and gives clients ENDING_S to read their end."""
        self._stop()
        asyncio.get_running_loop().call_later(ENDING_S, self._abort)
        await super().shutdown(sockets)

    def _abort(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        for task in self.server_state.tasks:
            task.cancel()


class LogLimit(logging.Filter):
    """A filter that lets a line of each kind pass once in LOG_INTERVAL_S, so that no client can fill the disk.

    The kind of a line is its place in the code, with the type and place of its exception. Cancelled tasks are not
    logged.
    """

    def __init__(self) -> None:
        super().__init__()
        self._latest: dict[object, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether the line is logged."""
        error, _, traceback = record.exc_info or (None, None, None)
        if error is not None and issubclass(error, asyncio.CancelledError):
            return False
        places = [(frame.f_code.co_filename, line) for frame, line in walk_tb(traceback)]
        kind, now = (record.module, record.lineno, error, *places[-1:]), time.monotonic()
        if now - self._latest.get(kind, -LOG_INTERVAL_S) < LOG_INTERVAL_S:
            return False
        self._latest[kind] = now
        return True
