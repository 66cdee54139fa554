"""A process that renders chat templates within limits of memory; `edgekv.chat.renderer` starts it and ends it.

It reads requests from standard input and writes answers to standard output: a length of 4 bytes, then JSON.
"""

import json
import resource
import signal
import struct
import sys
from typing import BinaryIO

MEMORY = 512 << 20
SECONDS = 30  # for one template: far beyond what the renderer waits, for a worker whose renderer was killed
LENGTH = struct.Struct("<I")


def read_message(stream: BinaryIO) -> bytes | None:
    """None at the stream's end."""
    prefix = stream.read(LENGTH.size)
    if len(prefix) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(prefix)
    data = stream.read(length)
    return data if len(data) == length else None


def main() -> None:
    """Answers requests from standard input on standard output until that ends, with bounds on memory and time."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from edgekv.chat.environment import answer

    while (data := read_message(sys.stdin.buffer)) is not None:
        signal.alarm(SECONDS)  # ends the process
        try:
            given = answer(**json.loads(data))
            reply = json.dumps(given).encode()
        except (MemoryError, RecursionError):
            reply = json.dumps({"refused": f"its text takes more than {MEMORY >> 20} MiB"}).encode()
        signal.alarm(0)
        sys.stdout.buffer.write(LENGTH.pack(len(reply)) + reply)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
