"""edgekv: Llama- and GPT-2-style models on small machines, with the KV cache in one to four bits."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from edgekv import errors

if TYPE_CHECKING:
    from edgekv.engine.chat import Chat as Chat
    from edgekv.engine.grammar import Constraint as Constraint
    from edgekv.engine.loading import LoadOptions as LoadOptions
    from edgekv.engine.report import RunReport as RunReport
    from edgekv.engine.sampling import Sampler as Sampler
    from edgekv.engine.sampling import SamplingParams as SamplingParams
    from edgekv.engine.session import Session as Session
    from edgekv.engine.session import Step as Step
    from edgekv.errors import *  # noqa: F403
    from edgekv.kvcache.registry import CACHES as CACHES
    from edgekv.kvcache.registry import CacheSpec as CacheSpec
    from edgekv.kvcache.registry import register as register
    from edgekv.kvcache.registry import schemes as schemes
    from edgekv.machine import __version__ as __version__
    from edgekv.models import register_family as register_family
    from edgekv.vision.model import Embeddings as Embeddings
_NAMES = {
    "engine.chat": "Chat",
    "engine.grammar": "Constraint",
    "engine.loading": "LoadOptions",
    "engine.report": "RunReport",
    "engine.sampling": "Sampler SamplingParams",
    "engine.session": "Session Step",
    "errors": " ".join(name for name in vars(errors) if name.endswith("Error")),
    "kvcache.registry": "CACHES CacheSpec register schemes",
    "machine": "__version__",
    "models": "register_family",
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
