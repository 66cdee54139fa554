"""edgekv: Llama- and GPT-2-style models on small machines, with the KV cache in one to four bits."""

from importlib import metadata
from typing import TYPE_CHECKING, Any

from edgekv.errors import EdgeKVError

if TYPE_CHECKING:
    from edgekv.generation import Step as Step
    from edgekv.kvcache import CACHES as CACHES
    from edgekv.sampling import SamplingParams as SamplingParams
    from edgekv.session import Session as Session
    from edgekv.spans import Embeddings as Embeddings

__version__ = metadata.version("edgekv")
__all__ = ["CACHES", "EdgeKVError", "Embeddings", "SamplingParams", "Session", "Step", "__version__"]

_HOMES = {
    "CACHES": "kvcache",
    "Embeddings": "spans",
    "SamplingParams": "sampling",
    "Session": "session",
    "Step": "generation",
}


def __getattr__(name: str) -> Any:
    """Public names load on first use: importing edgekv does not start numba or onnxruntime."""
    if name not in _HOMES:
        raise AttributeError(f"module 'edgekv' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"edgekv.{_HOMES[name]}"), name)
