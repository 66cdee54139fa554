"""Which file of each backend reads which kind of codec: the backends' trees have the same names.

Each of these files has a dict ``LOOPS``: by kind how its tokens are stored and read (`Loops` in loops.py of the
backend). They are imported when a kind is first used.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

from edgekv.errors import CacheError

KINDS: dict[str, str] = {
    "f16": "rows",
    "f32": "rows",
    "decoded": "decoded",
    "symmetric_keys": "ints",
    "symmetric_values": "ints",
    "centred_planes": "planes",
    "interleaved": "interleaved_values",
    "plane_keys": "gather",
    "plane_values": "gather",
    "signs": "papers.signs",
    "int4": "papers.int4",
    "kivi_keys": "papers.kivi",
    "kivi_values": "papers.kivi",
    "token_keys": "papers.mikv",
    "huffman_keys": "papers.huffman",
    "huffman_values": "papers.huffman",
    "levels": "papers.visual",
    "channel_levels": "papers.channel_levels",
    "sign_index": "papers.fier",
    "page_index": "papers.quest",
}
"""Kind of codec -> module in each backend."""

FUNCTIONS: dict[str, str] = {
    "short_conv": "recurrence",
    "gated_delta": "recurrence",
    "store_token": "papers.evict",
    "add_attention": "papers.evict",
    "evict_lowest": "papers.evict",
    "select_top": "papers.retrieval",
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

NO_CUDA = ("decoded", "token_keys", "levels", "channel_levels")
"""Kinds without CUDA kernels: those of policies that work on arrays of the host, and "decoded" itself."""


def reads(backend: str, kind: str) -> bool:
    """Whether the package ``backend`` has loops for the kind."""
    module = KINDS.get(kind)
    return module is not None and importlib.util.find_spec(f"{backend}.{module}") is not None


@functools.cache
def find_loops(backend: str, kind: str) -> Any:
    """The `Loops` of a kind in the package ``backend``. Raises CacheError (field kv) where there are none."""
    if not reads(backend, kind):
        raise CacheError(
            f"codec of kind {kind!r}: {backend} has no loops for it; give the codec the kind 'decoded' and a "
            "`decode`, or use device='cpu'",
            field="kv",
            value=kind,
            accepted=[each for each in KINDS if reads(backend, each)],
        )
    return importlib.import_module(f"{backend}.{KINDS[kind]}").LOOPS[kind]


def find_function(backend: str, name: str) -> Any:
    """A function of FUNCTIONS in the package ``backend``. AttributeError for any other name."""
    if name not in FUNCTIONS:
        raise AttributeError(f"module {backend!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{backend}.{FUNCTIONS[name]}"), name)
