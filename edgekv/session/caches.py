"""The KV caches of a decoder's layers, allocated."""

from __future__ import annotations

from typing import Any

from edgekv.checkpoint.adapter import Adapter
from edgekv.decoder.decoder import Decoder
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.base import KVCache
from edgekv.machine import memory_errors


def open_caches(
    decoder: Decoder, spec: CacheSpec, capacity: int, adapter: Adapter | None = None, kernels: Any = None
) -> list[KVCache]:
    """An empty cache of ``capacity`` tokens for every layer.

    An adapter's parameters go in where it is for this scheme. kernels: other ones than the decoder's. Raises
    CacheError where the scheme can't have the model's shape.
    """
    caches = spec.layers(decoder.config, capacity)
    if adapter and adapter.scheme in (spec.scheme.name, *spec.scheme.aliases):
        adapter.adapt(caches)
    with memory_errors("taking the caches' memory", decoder.free_bytes):
        for cache in caches:
            cache.allocate(kernels or decoder.kernels, decoder.workspace)
    return caches
