"""`edgekv` and `python -m edgekv`: what must be in place before anything large is imported."""

import os
import signal
import sys
from types import FrameType


def main() -> int:
    """The command line; returns the exit status."""
    _open_standard_streams()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from edgekv.cli import main as run

    return run(on_import=lambda: signal.signal(signal.SIGINT, before))


def _leave(number: int, frame: FrameType | None) -> None:
    """Ctrl-C while libraries are imported: an exception in the middle of that may become any other."""
    os._exit(130)


def _open_standard_streams() -> None:
    """A closed one is /dev/null: otherwise the next file that is opened would get its number, and its text."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


if __name__ == "__main__":
    sys.exit(main())
