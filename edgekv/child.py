"""Child processes, which import edgekv and its libraries and nothing from the working folder.

Libraries that a stranger's bytes can crash, or keep busy for ever, work in a `BoundedChild`. It runs `main`, which
reads requests from a socket, its standard input, and writes answers there: a length of 4 bytes and as many bytes.
"""

from __future__ import annotations

import importlib
import os
import pathlib
import resource
import signal
import socket
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
ORPHAN_SECONDS = 60  # for one answer, where the process that asked was killed
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
    """Returns the command that runs ``main(*arguments)`` of a module of edgekv, with this process's libraries.

    `python -m` looks for modules in the working folder first, where a downloaded model brought whatever it did.
    """
    home = str(pathlib.Path(__file__).resolve().parents[1])
    folders = (str(folder) for folder in sys.path if os.path.isabs(folder))
    path = [folder for folder in folders if folder == home or not _is_working_folder(folder)]
    code = f"import sys; sys.path[:] = {[*path, home]!a}; from {module} import main; main(*sys.argv[1:])"
    bytecode = ["-B"] if sys.dont_write_bytecode else []
    return [sys.executable or "python3", "-I", *bytecode, "-c", code, *arguments]


class BoundedChild:
    """A process in which ``answer(request)`` of a module of edgekv answers bytes with bytes, within bounds.

    ``close`` ends it, as does its collection. Raises EdgeKVError where it does not start.
    """

    def __init__(self, module: str) -> None:
        self._owner = os.getpid()
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command(__name__, module),
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,  # what a library prints is no answer
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is not for it
                    cwd="/",
                    env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ} | ONE_THREAD,
                )
            self.close = weakref.finalize(self, _end, self._process, self._socket, self._owner)
            self.ask(b"", START_SECONDS)
        except (OSError, ChildError) as error:
            self._socket.close()
            raise EdgeKVError(f"the process that runs {module} does not start: {error}") from None

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked; it can't in a process that was forked from the one that started it."""
        return self.close.alive and self._owner == os.getpid() and self._process.poll() is None

    def ask(self, request: bytes, seconds: float = 0) -> bytes:
        """Sends a request and returns the answer, within ``seconds`` (by default SECONDS).

        Raises ChildError. An interrupt ends the process, whose later answers would belong to no request.
        """
        if not self.is_alive:
            raise ChildError("its process has ended")
        seconds = seconds or SECONDS
        deadline = time.monotonic() + seconds
        try:
            self._socket.settimeout(seconds)
            self._socket.sendall(LENGTH.pack(len(request)) + request)
            (length,) = LENGTH.unpack(self._received(LENGTH.size, deadline))
            if length > MAX_ANSWER:
                raise ChildError(f"its answer has {length} bytes, more than {MAX_ANSWER}")
            return self._received(length, deadline)
        except TimeoutError:
            self.close()
            raise ChildError("it takes too long") from None
        except OSError:
            self.close()
            raise ChildError("it ended its process") from None
        except BaseException:
            self.close()
            raise

    def _received(self, length: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < length:
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            piece = self._socket.recv(min(length - len(data), 1 << 20))
            if not piece:
                raise ChildError("it ended its process")
            data += piece
        return bytes(data)


def ask(message: bytes) -> bytes:
    """Sends an answer or a question from within a bounded child; returns the next request."""
    _streams[1].write(LENGTH.pack(len(message)) + message)
    _streams[1].flush()
    return _read(*LENGTH.unpack(_read(LENGTH.size)))


def main(module: str) -> None:
    """Runs a bounded child: answers requests by a module's ``answer``. The first asks whether it has started."""
    for limit, most in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_STACK, STACK)):
        hard = resource.getrlimit(limit)[1]
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (bound, bound))
    _streams[:] = sys.stdin.buffer, os.fdopen(0, "wb", closefd=False)
    answer = importlib.import_module(module).answer
    _read(LENGTH.size)
    request = ask(b"")
    while True:
        signal.alarm(ORPHAN_SECONDS)  # ends the process
        reply = answer(request)
        signal.alarm(0)
        request = ask(reply)


def _read(n: int) -> bytes:
    data = _streams[0].read(n)
    if len(data) < n:
        os._exit(0)  # nobody asks any more
    return data


def _is_working_folder(folder: str) -> bool:
    try:
        return os.path.samefile(folder, os.curdir)
    except OSError:
        return False


def _end(process: subprocess.Popen[bytes], ours: socket.socket, owner: int) -> None:
    if owner == os.getpid():
        process.kill()
        process.wait()
    ours.close()
