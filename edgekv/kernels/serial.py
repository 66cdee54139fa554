"""A Python thread that is one of several workers runs its kernels on itself alone."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_local = threading.local()


@contextmanager
def serial_kernels() -> Iterator[None]:
    """Kernels called inside, by this Python thread, use no other threads."""
    _local.on = True
    try:
        yield
    finally:
        _local.on = False


def is_serial() -> bool:
    """Whether this Python thread is within `serial_kernels`."""
    return getattr(_local, "on", False)
