"""KV schemes of papers, and what they are compared with: a folder each, behind entry points like any package."""

from edgekv.errors import CacheError


def require_whole_bytes(kv: str, head_dim: int, per_byte: int) -> None:
    """Raises CacheError (field kv) where elements, ``per_byte`` of them to a byte, do not fill a head's bytes."""
    if head_dim % per_byte:
        text = f"kv={kv!r} packs {per_byte} elements to a byte: head_dim {head_dim} must be a multiple of that"
        raise CacheError(text, field="kv", value=kv)
