"""What packages with KV schemes, codecs or model families of their own build on; it changes as the version says.

A policy is a `KVCache`, or one of its two bases that are two codecs; a `Config` declares its options by `number`,
`one_of` and so on. ``loops``, ``scalar`` and ``tile`` are modules for loops on a CPU, loaded at their first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from edgekv.codecs.codec import Codec, Layout
from edgekv.codecs.f16 import F16
from edgekv.codecs.ints import Int8
from edgekv.errors import CacheError
from edgekv.kernels import Kernels
from edgekv.kernels.interface import Segment, Workspace
from edgekv.kvcache.cache import Geometry, KVCache
from edgekv.kvcache.config import Config, flag, number, one_of, seed, share_of_context, tokens
from edgekv.kvcache.policies import FullCache, SinkWindowCache, Sizes
from edgekv.models.architecture import Architecture
from edgekv.models.llama import Llama

if TYPE_CHECKING:
    from edgekv.kernels.cpu import loops, scalar, tile

__all__ = ["F16", "CacheError", "Codec", "FullCache", "Geometry", "Int8", "KVCache", "Kernels", "Layout"]
__all__ += ["Config", "flag", "number", "one_of", "seed", "share_of_context", "tokens"]
__all__ += ["Architecture", "Llama", "Segment", "SinkWindowCache", "Sizes", "Workspace", "loops", "scalar", "tile"]


def __getattr__(name: str) -> Any:
    if name not in ("loops", "scalar", "tile"):
        raise AttributeError(f"module 'edgekv.plugin' has no attribute {name!r}")
    return import_module(f"edgekv.kernels.cpu.{name}")
