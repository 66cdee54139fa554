"""What packages with KV schemes, codecs or model families of their own build on; it changes as the version says.

A policy is a `KVCache`, or one of its two bases that are two codecs; a `Config` declares its options by `number`,
`one_of` and so on. ``loops``, ``scalar`` and ``tile`` are modules for loops on a CPU, loaded at their first use.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

from edgekv.codecs.codec import Codec as Codec
from edgekv.codecs.codec import Layout as Layout
from edgekv.codecs.f16 import F16 as F16
from edgekv.codecs.ints import Int8 as Int8
from edgekv.errors import CacheError as CacheError
from edgekv.kernels import Kernels as Kernels
from edgekv.kernels.interface import Segment as Segment
from edgekv.kernels.interface import Workspace as Workspace
from edgekv.kvcache.cache import Geometry as Geometry
from edgekv.kvcache.cache import KVCache as KVCache
from edgekv.kvcache.config import Config as Config
from edgekv.kvcache.config import flag as flag
from edgekv.kvcache.config import number as number
from edgekv.kvcache.config import one_of as one_of
from edgekv.kvcache.config import seed as seed
from edgekv.kvcache.config import share_of_context as share_of_context
from edgekv.kvcache.config import tokens as tokens
from edgekv.kvcache.policies import FullCache as FullCache
from edgekv.kvcache.policies import SinkWindowCache as SinkWindowCache
from edgekv.kvcache.policies import Sizes as Sizes
from edgekv.models.architecture import Architecture as Architecture
from edgekv.models.llama import Llama as Llama

if TYPE_CHECKING:
    from edgekv.kernels.cpu import loops as loops
    from edgekv.kernels.cpu import scalar as scalar
    from edgekv.kernels.cpu import tile as tile


def __getattr__(name: str) -> _Any:
    if name not in ("loops", "scalar", "tile"):
        raise AttributeError(f"module 'edgekv.plugin' has no attribute {name!r}")
    return _import_module(f"edgekv.kernels.cpu.{name}")
