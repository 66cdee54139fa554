"""KV caches: which tokens are stored in which codec, and the registry of schemes."""

from edgekv.kvcache.registry import CACHES, CacheSpec, find_scheme, register, scheme_facts, schemes

__all__ = ["CACHES", "CacheSpec", "find_scheme", "register", "scheme_facts", "schemes"]
