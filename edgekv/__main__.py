"""The entry point of `edgekv` and `python -m edgekv`: sets up streams and signals before large imports."""

import os
import signal
import sys
import warnings
from types import FrameType


def main() -> int:
    """Runs the command line; returns the exit status."""
    _open_standard_streams()
    # NumPy's idle threads give up the cores, which kernels use, after 2^16 cycles in place of 2^26.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "16")
    warnings.simplefilter("ignore", RuntimeWarning)  # of damaged weights, whose logits are refused in one line
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from edgekv.cli import main as run

    return run(on_import=lambda: signal.signal(signal.SIGINT, before))


def _leave(number: int, frame: FrameType | None) -> None:
    """Exits at a Ctrl-C while libraries are imported, in the middle of which an exception may become another."""
    os._exit(130)


def _open_standard_streams() -> None:
    """Opens closed standard streams as /dev/null; otherwise the next opened file would get their output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


if __name__ == "__main__":
    sys.exit(main())
