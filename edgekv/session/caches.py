"""The states of a decoder's layers, allocated: KV caches, as a rule."""

from __future__ import annotations

from typing import Any

from edgekv.checkpoint.adapter import Adapter
from edgekv.decoder.decoder import Decoder
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.layer_state import LayerState
from edgekv.kvcache.recurrent import attending, open_layers
from edgekv.machine import memory_errors


def open_caches(
    decoder: Decoder, spec: CacheSpec, capacity: int, adapter: Adapter | None = None, kernels: Any = None
) -> list[LayerState]:
    """An empty cache of ``capacity`` tokens for every layer, or the state of one that does not attend.

    An adapter's parameters go in where it is for this scheme. kernels: other ones than the decoder's. Raises
    CacheError where the scheme can't have the model's shape.
    """
    caches = open_layers(spec, decoder.config, capacity)
    if adapter and adapter.scheme in (spec.scheme.name, *spec.scheme.aliases):
        adapter.adapt(attending(caches))
    with memory_errors("taking the caches' memory", decoder.free_bytes):
        for cache in caches:
            cache.allocate(kernels or decoder.kernels, decoder.workspace)
    return caches
