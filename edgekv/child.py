"""Other Python processes: what one runs is edgekv's and its libraries', never what lies in the working folder.

Libraries that a stranger's bytes can crash, or keep busy for ever, work in a `BoundedChild`. It runs `main`, which
reads requests from standard input and writes answers to standard output: a length of 4 bytes and as many bytes.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import resource
import select
import signal
import struct
import subprocess
import sys
import time
import weakref
from typing import BinaryIO

from edgekv.errors import EdgeKVError

MEMORY = 512 << 20
STACK = 64 << 20  # for parsers that call themselves
SECONDS = 5.0  # for one answer
START_SECONDS = 60.0  # until the process answers for the first time, on a small and busy machine
ALONE_SECONDS = 60  # for one answer, far beyond what is waited for, when the process that asked was killed
MAX_ANSWER = 32 << 20  # bytes
ENVIRONMENT = "PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR", "TZ"  # no tokens, no keys
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
LENGTH = struct.Struct("<I")
_streams: list[BinaryIO] = []  # within a bounded child: requests, answers


class ChildError(Exception):
    """Why a bounded child gave no answer."""

    def __str__(self) -> str:
        return f"{super().__str__()}; it may take {SECONDS:g} s and {MEMORY >> 20} MiB"


def command(module: str, *arguments: str) -> list[str]:
    """What runs ``main(*arguments)`` of a module of edgekv, with the libraries that this process has.

    `python -m` looks for modules in the working folder first, where a downloaded model brought whatever it did.
    """
    home = str(pathlib.Path(__file__).resolve().parents[1])
    path = [str(each) for each in sys.path if os.path.isabs(each) and (each == home or not _is_here(each))]
    code = f"import sys; sys.path[:] = {[*path, home]!a}; from {module} import main; main(*sys.argv[1:])"
    bytecode = ["-B"] if sys.dont_write_bytecode else []
    return [sys.executable or "python3", "-I", *bytecode, "-c", code, *arguments]


class BoundedChild:
    """A process in which ``answer(request)`` of a module of edgekv answers bytes with bytes, within bounds.

    ``close`` ends it, as does its collection. Raises EdgeKVError where it does not start.
    """

    def __init__(self, module: str) -> None:
        self._owner, pipe = os.getpid(), subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command(__name__, module),
                stdin=pipe,
                stdout=pipe,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is not for it
                cwd="/",
                env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ} | ONE_THREAD,
            )
        except OSError as error:
            raise EdgeKVError(f"the process that runs {module} does not start: {error}") from None
        self.close = weakref.finalize(self, _end, self._process, self._owner)
        try:
            self.ask(b"", START_SECONDS)
        except ChildError as error:
            raise EdgeKVError(f"the process that runs {module} does not start: {error}") from None

    @property
    def is_alive(self) -> bool:
        """Whether it may be asked: not in a process that was forked from the one that started it."""
        return self.close.alive and self._owner == os.getpid() and self._process.poll() is None

    def ask(self, request: bytes, seconds: float = 0) -> bytes:
        """The answer. Whatever interrupts it ends the process: what it says later is no one's.

        seconds: that it may take, by default SECONDS. Raises ChildError.
        """
        if not self.is_alive:
            raise ChildError("its process has ended")
        try:
            return self._exchanged(request, time.monotonic() + (seconds or SECONDS))
        except OSError:
            self.close()
            raise ChildError("it ended its process") from None
        except BaseException:
            self.close()
            raise

    def _exchanged(self, request: bytes, deadline: float) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        out, back = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(out, False)
        rest = memoryview(LENGTH.pack(len(request)) + request)
        while rest:
            _wait(out, select.POLLOUT, deadline)
            rest = rest[os.write(out, rest) :]
        (length,) = LENGTH.unpack(_received(back, LENGTH.size, deadline))
        if length > MAX_ANSWER:
            raise ChildError(f"its answer has {length} bytes, more than {MAX_ANSWER}")
        return _received(back, length, deadline)


def ask(question: bytes) -> bytes:
    """Within a bounded child, before its answer: a question as the answer, and the next request."""
    _streams[1].write(LENGTH.pack(len(question)) + question)
    _streams[1].flush()
    return _read(*LENGTH.unpack(_read(LENGTH.size)))


def main(module: str) -> None:
    """Within a bounded child: a module's ``answer`` to each request. The first one asks whether it has started."""
    for limit, most in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_STACK, STACK)):
        hard = resource.getrlimit(limit)[1]
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (bound, bound))
    _streams[:] = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    answer = importlib.import_module(module).answer
    _read(LENGTH.size)
    request = ask(b"")
    while True:
        signal.alarm(ALONE_SECONDS)  # ends the process
        reply = answer(request)
        signal.alarm(0)
        request = ask(reply)


def _read(n: int) -> bytes:
    data = _streams[0].read(n)
    if len(data) < n:
        os._exit(0)  # nobody asks any more
    return data


def _is_here(folder: str) -> bool:
    try:
        return os.path.samefile(folder, os.curdir)
    except OSError:
        return False


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if owner == os.getpid():
        process.kill()
        process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def _received(descriptor: int, length: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < length:
        _wait(descriptor, select.POLLIN, deadline)
        piece = os.read(descriptor, length - len(data))
        if not piece:
            raise ChildError("it ended its process")
        data += piece
    return bytes(data)


def _wait(descriptor: int, event: int, deadline: float) -> None:
    poll, left = select.poll(), deadline - time.monotonic()
    poll.register(descriptor, event)
    if left <= 0 or not poll.poll(1000 * left):
        raise ChildError("it takes too long")
