"""Which module of a backend reads a codec, and which has a function that few models and schemes call.

Both are imported when they are first used.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

FUNCTIONS: dict[str, str] = {
    "short_conv": "recurrence",
    "gated_delta": "recurrence",
    "gather_tokens": "papers.retrieval",
    "encode_fier": "papers.fier",
    "encode_pages": "papers.quest",
    "encode_levels": "papers.visual",
    "quantize_channels": "papers.huffman_levels",
    "quantize_tokens": "papers.huffman_levels",
    "huffman_sizes": "papers.huffman",
    "huffman_pack": "papers.huffman",
}
"""What only some models and the papers' schemes call -> module in each backend.

Their meaning is in `edgekv.kernels.contract`, in recurrence.py and in papers. CUDA has no recurrences.
"""


def find_loops(backend: str, codec: Any) -> Any:
    """Returns how ``backend`` (reference, cpu, cuda) reads a codec: ``LOOPS[codec.kind]`` of its module.

    None: the codec brings nothing for it.
    """
    module: str | None = codec.backends.get(backend)
    return None if module is None else _loops(module, codec.kind)


@functools.cache
def _loops(module: str, kind: str) -> Any:
    return importlib.import_module(module).LOOPS[kind]


def find_function(backend: str, name: str) -> Any:
    """Returns a function of FUNCTIONS in the package ``backend``. Raises AttributeError for any other name."""
    if name not in FUNCTIONS:
        raise AttributeError(f"module {backend!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{backend}.{FUNCTIONS[name]}"), name)
