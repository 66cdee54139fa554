"""edgekv: Llama- and GPT-2-style models on small machines, with the KV cache in one to four bits."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from edgekv import errors

if TYPE_CHECKING:
    from edgekv.codecs.codec import Codec as Codec
    from edgekv.codecs.codec import Layout as Layout
    from edgekv.engine.chat import Chat as Chat
    from edgekv.engine.grammar import Constraint as Constraint
    from edgekv.engine.loading import LoadOptions as LoadOptions
    from edgekv.engine.report import RunReport as RunReport
    from edgekv.engine.sampling import Sampler as Sampler
    from edgekv.engine.sampling import SamplingParams as SamplingParams
    from edgekv.engine.session import Session as Session
    from edgekv.engine.session import Step as Step
    from edgekv.errors import *  # noqa: F403
    from edgekv.kernels.interface import Segment as Segment
    from edgekv.kvcache.cache import Geometry as Geometry
    from edgekv.kvcache.cache import KVCache as KVCache
    from edgekv.kvcache.policies import FullCache as FullCache
    from edgekv.kvcache.policies import SinkWindowCache as SinkWindowCache
    from edgekv.kvcache.registry import CACHES as CACHES
    from edgekv.kvcache.registry import CacheSpec as CacheSpec
    from edgekv.kvcache.registry import register as register
    from edgekv.kvcache.registry import schemes as schemes
    from edgekv.machine import __version__ as __version__
    from edgekv.models import register_family as register_family
    from edgekv.models.architecture import Architecture as Architecture
    from edgekv.models.llama import Llama as Llama
    from edgekv.vision.model import Embeddings as Embeddings
_NAMES = {
    "codecs.codec": "Codec Layout",
    "engine.chat": "Chat",
    "engine.grammar": "Constraint",
    "engine.loading": "LoadOptions",
    "engine.report": "RunReport",
    "engine.sampling": "Sampler SamplingParams",
    "engine.session": "Session Step",
    "errors": " ".join(name for name in vars(errors) if name.endswith("Error")),
    "kernels.interface": "Segment",
    "kvcache.cache": "Geometry KVCache",
    "kvcache.registry": "CACHES CacheSpec register schemes",
    "kvcache.policies": "FullCache SinkWindowCache",
    "machine": "__version__",
    "models": "register_family",
    "models.architecture": "Architecture",
    "models.llama": "Llama",
    "vision.model": "Embeddings",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use: `import edgekv` is fast, and `__main__` can handle a Ctrl-C."""
    if name not in _HOMES:
        raise AttributeError(f"module 'edgekv' has no attribute {name!r}")
    return getattr(import_module(f"edgekv.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
