"""Chat templates are programs from strangers: they run in a process of their own, which may be ended.

Jinja's sandbox keeps them from files and the network, but not from `'x' * 10**10` or a loop without end.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from edgekv.chat.worker import LENGTH, MEMORY
from edgekv.errors import EdgeKVError

SECONDS = 5.0  # for one text
START_SECONDS = 60.0  # until the process answers for the first time, on a small and busy machine
MAX_TEXT = 32 << 20  # bytes of an answer


class Renderer:
    """One process for all templates of this one, started when it is needed and again after it was ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def answer(self, source: str, names: Mapping[str, Any] | None) -> dict[str, str]:
        """See `environment.answer`. A text that is not there in time, or too large, is "refused" too."""
        try:
            request = json.dumps({"source": source, "names": names}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            return {"refused": f"they are no JSON ({error})"}
        with self._lock:
            process = self._running()
            try:
                data = self._exchanged(process, request, SECONDS)
            except (OSError, ValueError) as error:
                return {"refused": f"{error}; it may take {SECONDS:g} s and {MEMORY >> 20} MiB"}
        answer: dict[str, str] = json.loads(data)
        return answer

    def close(self) -> None:
        """Ends the process; the next template starts another."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        self.close()
        if importlib.util.find_spec("jinja2") is None:
            raise EdgeKVError("chat templates need jinja2: pip install 'edgekv[chat]'")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, "-m", "edgekv.chat.worker"]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C is not for it
            )
            self._owner = os.getpid()
            self._exchanged(self._process, b'{"source": "", "names": null}', START_SECONDS)
        except (OSError, ValueError) as error:
            raise EdgeKVError(f"the process that renders chat templates does not start: {error}") from None
        return self._process

    def _exchanged(self, process: subprocess.Popen[bytes], request: bytes, seconds: float) -> bytes:
        """The answer to a request. Whatever interrupts it ends the process: what it says later is no one's."""
        try:
            return _exchange(process, request, time.monotonic() + seconds)
        except BaseException:
            self.close()
            raise


def _exchange(process: subprocess.Popen[bytes], request: bytes, deadline: float) -> bytes:
    """The answer to a request. OSError, ValueError: the process ends, is too slow or says too much."""
    assert process.stdin is not None
    assert process.stdout is not None
    out, back = process.stdin.fileno(), process.stdout.fileno()
    os.set_blocking(out, False)
    rest = memoryview(LENGTH.pack(len(request)) + request)
    while rest:
        _wait(out, select.POLLOUT, deadline)
        rest = rest[os.write(out, rest) :]
    (length,) = LENGTH.unpack(_received(back, LENGTH.size, deadline))
    if length > MAX_TEXT:
        raise ValueError(f"its text has {length} bytes, more than {MAX_TEXT}")
    return _received(back, length, deadline)


def _received(descriptor: int, length: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < length:
        _wait(descriptor, select.POLLIN, deadline)
        piece = os.read(descriptor, length - len(data))
        if not piece:
            raise ValueError("it ended its process")
        data += piece
    return bytes(data)


def _wait(descriptor: int, event: int, deadline: float) -> None:
    poll, left = select.poll(), deadline - time.monotonic()
    poll.register(descriptor, event)
    if left <= 0 or not poll.poll(1000 * left):
        raise ValueError("it takes too long")


RENDERER = Renderer()
atexit.register(RENDERER.close)
