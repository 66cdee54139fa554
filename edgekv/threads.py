"""One thread pool at a time: BLAS runs on all cores in prefill and on one in decode, beside onnxruntime's."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager

from threadpoolctl import ThreadpoolController


@functools.cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


def blas_threads(n: int) -> AbstractContextManager[object]:
    """NumPy's matrix products use ``n`` threads inside the block; the previous number is restored."""
    limit: AbstractContextManager[object] = _controller().limit(limits=n, user_api="blas")
    return limit
