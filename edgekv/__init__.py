"""edgekv: Llama- and GPT-2-style models on small machines, with the KV cache in one to four bits."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from edgekv import errors

if TYPE_CHECKING:
    from edgekv.chat.conversation import Chat as Chat
    from edgekv.errors import CacheError as CacheError
    from edgekv.errors import CheckpointError as CheckpointError
    from edgekv.errors import ConfigError as ConfigError
    from edgekv.errors import ContextError as ContextError
    from edgekv.errors import EdgeKVError as EdgeKVError
    from edgekv.errors import ImageError as ImageError
    from edgekv.errors import MemoryBudgetError as MemoryBudgetError
    from edgekv.errors import PowerError as PowerError
    from edgekv.errors import SessionError as SessionError
    from edgekv.errors import TokenizerError as TokenizerError
    from edgekv.kernels.contract.segment import Segment as Segment
    from edgekv.kvcache.base import KVCache as KVCache
    from edgekv.kvcache.codecs import Codec as Codec
    from edgekv.kvcache.geometry import Geometry as Geometry
    from edgekv.kvcache.geometry import Layout as Layout
    from edgekv.kvcache.keepall import KeepAll as KeepAll
    from edgekv.kvcache.registry import CACHES as CACHES
    from edgekv.kvcache.registry import register as register
    from edgekv.kvcache.spec import CacheSpec as CacheSpec
    from edgekv.kvcache.windowed import Windowed as Windowed
    from edgekv.session.generation import Step as Step
    from edgekv.session.grammar import Constraint as Constraint
    from edgekv.session.options import LoadOptions as LoadOptions
    from edgekv.session.report import RunReport as RunReport
    from edgekv.session.sampling import Sampler as Sampler
    from edgekv.session.sampling_params import SamplingParams as SamplingParams
    from edgekv.session.session import Session as Session
    from edgekv.version import __version__ as __version__
    from edgekv.vision.prompt import Embeddings as Embeddings

_HOMES = {
    "CACHES": "kvcache.registry",
    "CacheSpec": "kvcache.spec",
    "Chat": "chat.conversation",
    "Codec": "kvcache.codecs",
    "Constraint": "session.grammar",
    "Embeddings": "vision.prompt",
    "Geometry": "kvcache.geometry",
    "KVCache": "kvcache.base",
    "KeepAll": "kvcache.keepall",
    "Layout": "kvcache.geometry",
    "LoadOptions": "session.options",
    "RunReport": "session.report",
    "Sampler": "session.sampling",
    "SamplingParams": "session.sampling_params",
    "Segment": "kernels.contract.segment",
    "Session": "session.session",
    "Step": "session.generation",
    "Windowed": "kvcache.windowed",
    "__version__": "version",
    "register": "kvcache.registry",
    **dict.fromkeys((name for name in vars(errors) if name.endswith("Error")), "errors"),
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Public names load on first use: importing edgekv starts no numba or onnxruntime, and is soon done.

    What a Ctrl-C interrupts is then `__main__`, which knows what to do.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'edgekv' has no attribute {name!r}")
    return getattr(import_module(f"edgekv.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
