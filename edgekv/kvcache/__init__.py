"""KV schemes: one file per scheme; the CLI's choices, the tests and the documents' tables all read CACHES."""

from edgekv.kvcache.registry import CACHES, CacheSpec, find_scheme, register, scheme_facts, schemes

__all__ = ["CACHES", "CacheSpec", "find_scheme", "register", "scheme_facts", "schemes"]
