"""Layers that do not attend: what such a layer carries from token to token, in place of keys and values.

Each kind is a kernel of `edgekv.kernels.contract.recurrence` by the name ``kernel``. It turns the layer's
projection (n, ``projected``) into what its `attention_out` reads (n, ``mixed``), and changes the state's arrays.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

Shapes = dict[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class ShortConv:
    """LFM2's: y = c * conv(b * x), with a causal convolution of ``taps`` tokens of each of ``channels`` by itself.

    bias: of the convolution, and of the projections around it.
    """

    kernel: ClassVar[str] = "short_conv"

    channels: int
    taps: int
    bias: bool

    @property
    def projected(self) -> int:
        """b, c and x side by side."""
        return 3 * self.channels

    @property
    def mixed(self) -> int:
        """Channels of the result."""
        return self.channels

    def state(self) -> Shapes:
        """window: the latest products b * x."""
        return {"window": (self.taps - 1, self.channels)}

    def constants(self) -> dict[str, float]:
        """Numbers that the kernel is given beside weights."""
        return {}


@dataclasses.dataclass(frozen=True)
class GatedDelta:
    """Gated DeltaNet (arXiv 2412.06464) as Qwen3.5 has it: each token decays and corrects a matrix of each head.

    A convolution of ``taps`` tokens and SiLU over queries, keys (``key_heads`` of ``key_dim`` channels each) and
    values (``value_heads`` of ``value_dim``) come before it, a gated RMS norm of each value head behind it.
    """

    kernel: ClassVar[str] = "gated_delta"

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    eps: float

    @property
    def convolved(self) -> int:
        """Channels of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.mixed

    @property
    def projected(self) -> int:
        """Queries, keys and values, gates of the result, and for each value head its beta and its decay."""
        return self.convolved + self.mixed + 2 * self.value_heads

    @property
    def mixed(self) -> int:
        """Channels of the result."""
        return self.value_heads * self.value_dim

    def state(self) -> Shapes:
        """window: what the convolution reads of earlier tokens. matrix: of each value head."""
        return {
            "window": (self.taps - 1, self.convolved),
            "matrix": (self.value_heads, self.key_dim, self.value_dim),
        }

    def constants(self) -> dict[str, float]:
        """Numbers that the kernel is given beside weights."""
        return {"eps": self.eps}


Recurrence = ShortConv | GatedDelta
