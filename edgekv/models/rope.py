"""Rotary position embedding: frequencies of every rope_scaling type in use, and the cos/sin tables.

Formulas and defaults follow transformers' modeling_rope_utils (checked against it by the golden logits).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekv.errors import ConfigError

F32 = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary settings: ``dim`` rotated channels per head, base ``theta``, scaling ``kind`` and its parameters.

    ``max_positions`` is the longest context that the scaling is meant for.
    """

    dim: int
    theta: float
    kind: str
    trained_positions: int
    max_positions: int
    params: Mapping[str, Any]

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], head_dim: int, positions: int) -> RopeConfig:
        """From config.json: ``rope_scaling`` + ``rope_theta`` (transformers 4) or ``rope_parameters`` (5).

        Raises ConfigError for an unknown scaling type or a missing parameter.
        """
        params: dict[str, Any] = {**(raw.get("rope_parameters") or {}), **(raw.get("rope_scaling") or {})}
        kind = params.get("rope_type", params.get("type", "default"))
        kind = {"su": "longrope", "mrope": "default"}.get(kind, kind)
        if kind not in ROPE_TYPES:
            raise ConfigError(
                f"config.json: rope_scaling type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
            )
        needed = ROPE_TYPES[kind][1]
        for name in needed:
            if name not in params:
                raise ConfigError(f"config.json: rope_scaling of type {kind!r} needs {name!r}")
        theta = float(params.get("rope_theta") or raw.get("rope_theta") or 10000.0)
        partial = params.get("partial_rotary_factor", raw.get("partial_rotary_factor")) or 1.0
        original = params.get("original_max_position_embeddings", raw.get("original_max_position_embeddings"))
        params["original_max_position_embeddings"] = int(original or positions)
        dim = int(head_dim * partial)
        if dim % 2 or dim < 2:
            raise ConfigError(f"config.json: head_dim {head_dim} gives {dim} rotated channels; it must be even")
        reach = positions
        if kind in ("linear", "dynamic"):
            reach = int(positions * float(params["factor"]))
        elif kind == "yarn":
            reach = max(positions, int(params["original_max_position_embeddings"] * float(params["factor"])))
        return cls(dim, theta, kind, positions, reach, params)

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies change with the length of the sequence."""
        return self.kind in ("dynamic", "longrope")


def frequencies(rope: RopeConfig, seq_len: int) -> tuple[npt.NDArray[np.float64], float]:
    """Inverse frequencies (dim/2,) for a sequence of ``seq_len`` tokens, and the factor on cos and sin."""
    exponents = np.arange(0, rope.dim, 2) / rope.dim
    return ROPE_TYPES[rope.kind][0](rope, exponents, seq_len)


class RopeTable:
    """cos and sin of the positions below ``capacity``; made once, unless they depend on the length."""

    def __init__(self, rope: RopeConfig, capacity: int) -> None:
        self.rope = rope
        self._fixed = None if rope.depends_on_length else self._compute(0, capacity, capacity)

    def at(self, start: int, n: int) -> tuple[F32, F32]:
        """cos, sin (n, dim/2) float32 of positions start..start+n, the last of the sequence so far."""
        if self._fixed is None:
            return self._compute(start, n, start + n)
        cos, sin = self._fixed
        return cos[start : start + n], sin[start : start + n]

    def _compute(self, start: int, n: int, seq_len: int) -> tuple[F32, F32]:
        freq, factor = frequencies(self.rope, seq_len)
        angles = np.arange(start, start + n)[:, None] * freq  # (n, dim/2)
        return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)


Result = tuple[npt.NDArray[np.float64], float]


def _default(rope: RopeConfig, exponents: npt.NDArray[np.float64], seq_len: int) -> Result:
    return rope.theta**-exponents, 1.0


def _linear(rope: RopeConfig, exponents: npt.NDArray[np.float64], seq_len: int) -> Result:
    return rope.theta**-exponents / float(rope.params["factor"]), 1.0


def _dynamic(rope: RopeConfig, exponents: npt.NDArray[np.float64], seq_len: int) -> Result:
    """NTK-aware base that grows with the sequence once it is longer than the trained positions."""
    factor, trained = float(rope.params["factor"]), rope.trained_positions
    growth = factor * max(seq_len, trained) / trained - (factor - 1)
    theta = rope.theta * growth ** (rope.dim / (rope.dim - 2))
    return theta**-exponents, 1.0


def _llama3(rope: RopeConfig, exponents: npt.NDArray[np.float64], seq_len: int) -> Result:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a smooth blend between."""
    factor, low, high = (float(rope.params[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(rope.params["original_max_position_embeddings"])
    freq = rope.theta**-exponents
    smooth = np.clip((original * freq / (2 * math.pi) - low) / (high - low), 0.0, 1.0)
    return (1 - smooth) * freq / factor + smooth * freq, 1.0


def _yarn(rope: RopeConfig, exponents: npt.NDArray[np.float64], seq_len: int) -> Result:
    """YaRN (arXiv:2309.00071): interpolate low frequencies, extrapolate high ones, scale the attention."""
    p = rope.params
    original = float(p["original_max_position_embeddings"])
    factor = float(p["factor"])
    attention = p.get("attention_factor")
    if attention is None:
        mscale, mscale_all = p.get("mscale"), p.get("mscale_all_dim")
        attention = (
            _mscale(factor, mscale) / _mscale(factor, mscale_all) if mscale and mscale_all else _mscale(factor)
        )

    def channel(rotations: float) -> float:
        return rope.dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = channel(float(p.get("beta_fast") or 32)), channel(float(p.get("beta_slow") or 1))
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = np.clip((np.arange(rope.dim // 2) - low) / (high - low or 0.001), 0.0, 1.0)
    freq = rope.theta**-exponents
    return freq / factor * ramp + freq * (1 - ramp), float(attention)


def _mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(rope: RopeConfig, exponents: npt.NDArray[np.float64], seq_len: int) -> Result:
    """LongRoPE (arXiv:2402.13753): one factor per channel, another set beyond the original context."""
    p = rope.params
    original = int(p["original_max_position_embeddings"])
    factor = float(p.get("factor") or rope.trained_positions / original)
    attention = p.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    per_channel = np.asarray(p["long_factor" if seq_len > original else "short_factor"], np.float64)
    if per_channel.shape != exponents.shape:
        raise ConfigError(
            f"config.json: rope_scaling factors have {per_channel.size} entries; head_dim needs {exponents.size}"
        )
    return rope.theta**-exponents / per_channel, float(attention)


Formula = Callable[[RopeConfig, npt.NDArray[np.float64], int], Result]
ROPE_TYPES: dict[str, tuple[Formula, tuple[str, ...]]] = {
    "default": (_default, ()),
    "linear": (_linear, ("factor",)),
    "dynamic": (_dynamic, ("factor",)),
    "yarn": (_yarn, ("factor",)),
    "longrope": (_longrope, ("short_factor", "long_factor")),
    "llama3": (_llama3, ("factor", "low_freq_factor", "high_freq_factor")),
}
