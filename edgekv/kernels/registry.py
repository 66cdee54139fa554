"""Which module of a backend reads a codec, and which has a function that few models and schemes call.

Both are imported when they are first used.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

FUNCTIONS: dict[str, str] = {"short_conv": "recurrence", "gated_delta": "recurrence"}
"""What only some models call -> module in each backend. CUDA has none of them."""


def find_codec_kernels(backend: str, codec: Any) -> Any:
    """Returns how ``backend`` (reference, cpu, cuda) reads a codec: ``KERNELS[codec.kind]`` of its module.

    None: the codec brings nothing for it.
    """
    module: str | None = codec.backends.get(backend)
    return None if module is None else _loops(module, codec.kind)


@functools.cache
def _loops(module: str, kind: str) -> Any:
    return importlib.import_module(module).KERNELS[kind]


def find_function(backend: str, name: str) -> Any:
    """Returns a function of FUNCTIONS in the package ``backend``. Raises AttributeError for any other name."""
    if name not in FUNCTIONS:
        raise AttributeError(f"module {backend!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{backend}.{FUNCTIONS[name]}"), name)


def package_function(kernels: Any, package: str, name: str) -> Callable[..., Any]:
    """Returns a function of a codec's own package, from its module of the kernels' backend.

    On CUDA the kernels are its first argument.
    """
    function: Callable[..., Any] = getattr(importlib.import_module(f"{package}.{kernels.backend}"), name)
    return functools.partial(function, kernels) if kernels.backend == "cuda" else function
