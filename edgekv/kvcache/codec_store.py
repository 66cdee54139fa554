"""Caches whose arrays are those of codecs."""

from __future__ import annotations

import abc
from typing import Any

from edgekv.kernels import Kernels
from edgekv.kvcache.base import KVCache
from edgekv.kvcache.codecs import Codec
from edgekv.kvcache.geometry import EXAMPLE, Layout, Workspace


class CodecStore(KVCache):
    """Lays out and binds what `stored` names: array ``half`` of the codec ``key`` is ``key.half``."""

    @abc.abstractmethod
    def stored(self) -> dict[str, Codec]:
        """Its codecs, by the names that their arrays begin with."""

    @classmethod
    def kinds(cls, knobs: Any) -> set[str] | None:
        return {codec.kind for codec in cls(EXAMPLE, knobs).stored().values()}

    def layout(self) -> Layout:
        codecs = self.stored().items()
        return {f"{end}.{name}": spec for end, codec in codecs for name, spec in codec.layout().items()}

    def allocate(self, kernels: Kernels, workspace: Workspace) -> None:
        super().allocate(kernels, workspace)
        for end, codec in self.stored().items():
            codec.bind({name: self.arrays[f"{end}.{name}"] for name in codec.layout()}, kernels)
