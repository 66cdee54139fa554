"""edgekv: Llama- and GPT-2-style models on small machines, with the KV cache in one to four bits."""

from importlib import metadata
from typing import TYPE_CHECKING, Any

from edgekv.errors import EdgeKVError

if TYPE_CHECKING:
    from edgekv.kvcache import CACHES as CACHES
    from edgekv.session.generation import Step as Step
    from edgekv.session.prompt import Embeddings as Embeddings
    from edgekv.session.sampling import SamplingParams as SamplingParams
    from edgekv.session.session import Session as Session

__version__ = metadata.version("edgekv")
__all__ = ["CACHES", "EdgeKVError", "Embeddings", "SamplingParams", "Session", "Step", "__version__"]

_HOMES = {
    "CACHES": "kvcache",
    "Embeddings": "session.prompt",
    "SamplingParams": "session.sampling",
    "Session": "session.session",
    "Step": "session.generation",
}


def __getattr__(name: str) -> Any:
    """Public names load on first use: importing edgekv does not start numba or onnxruntime."""
    if name not in _HOMES:
        raise AttributeError(f"module 'edgekv' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"edgekv.{_HOMES[name]}"), name)
