"""Rotary position embedding: frequencies of every rope_scaling type in use, and the cos/sin tables.

Formulas and defaults follow transformers' modeling_rope_utils (checked against it by the golden logits).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from edgekv.errors import ConfigError
from edgekv.models.files import LlamaFile, RopeFile
from edgekv.schema import read
from edgekv.types import F32


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
    params: RopeFile

    @classmethod
    def from_file(cls, file: LlamaFile, head_dim: int, positions: int) -> RopeConfig:
        """From config.json: ``rope_scaling`` + ``rope_theta`` (transformers 4) or ``rope_parameters`` (5).

        As in transformers, a rope_scaling that was added replaces rope_parameters (but not their theta, where
        transformers takes 10000), and the Llama family has no partial_rotary_factor. Raises ConfigError for
        an unknown scaling type, a missing parameter or ones that contradict each other.
        """
        name = "rope_scaling" if file.rope_scaling or not file.rope_parameters else "rope_parameters"
        params = read(getattr(file, name) or {}, RopeFile, f"config.json: {name}")
        older = read(file.rope_parameters or {}, RopeFile, "config.json: rope_parameters")
        kind = params.rope_type or params.type or "default"
        kind = {"su": "longrope", "mrope": "default"}.get(kind, kind)
        if kind not in ROPE_TYPES:
            raise ConfigError(
                f"config.json: {name} type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
            )
        theta = params.rope_theta or older.rope_theta or file.rope_theta or 10000.0
        original = file.original_max_position_embeddings or params.original_max_position_embeddings or positions
        if kind == "yarn" and params.factor is None and "factor" in (getattr(file, name) or {}):
            params.factor = positions / original  # null
        for needed in ROPE_TYPES[kind][1]:
            if getattr(params, needed) is None:
                raise ConfigError(f"config.json: {name} of type {kind!r} needs {needed!r}, a number")
        if head_dim % 2:
            raise ConfigError(f"config.json: head_dim {head_dim} can't be rotated; it must be even")
        params.original_max_position_embeddings = original
        _require_together(name, kind, params, head_dim)
        reach, factor = positions, params.factor or 1.0
        if kind in ("linear", "dynamic"):
            reach = max(1, int(positions * factor))
        elif kind == "yarn":
            reach = max(positions, int(original * factor))
        return cls(head_dim, theta, kind, positions, reach, params)

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies change with the length of the sequence."""
        return self.kind in ("dynamic", "longrope")


def _require_together(name: str, kind: str, params: RopeFile, head_dim: int) -> None:
    """ConfigError where parameters of a type contradict each other."""
    low, high = params.low_freq_factor or 0.0, params.high_freq_factor or 0.0
    if kind == "llama3" and high <= low:
        raise ConfigError(
            f"config.json: {name} has high_freq_factor {high:g}; accepted: more than low_freq_factor, {low:g}"
        )
    if kind == "dynamic" and head_dim < 4:
        raise ConfigError(
            f"config.json: head_dim {head_dim} is too small for {name} of type 'dynamic'; at least 4"
        )
    if kind != "longrope":
        return
    if params.original_max_position_embeddings == 1:
        raise ConfigError(f"config.json: {name} of type 'longrope' can't have an original length of 1 token")
    for side in ("short_factor", "long_factor"):
        n = len(getattr(params, side))
        if n != head_dim // 2:
            raise ConfigError(
                f"config.json: {name} has {n} entries in {side}; head_dim {head_dim} needs {head_dim // 2}"
            )


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
    return rope.theta**-exponents / _number(rope.params.factor), 1.0


def _dynamic(rope: RopeConfig, exponents: npt.NDArray[np.float64], seq_len: int) -> Result:
    """NTK-aware base that grows with the sequence once it is longer than the trained positions."""
    factor, trained = _number(rope.params.factor), rope.trained_positions
    growth = factor * max(seq_len, trained) / trained - (factor - 1)
    theta = rope.theta * growth ** (rope.dim / (rope.dim - 2))
    return theta**-exponents, 1.0


def _llama3(rope: RopeConfig, exponents: npt.NDArray[np.float64], seq_len: int) -> Result:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a smooth blend between."""
    p = rope.params
    factor, low, high = (_number(x) for x in (p.factor, p.low_freq_factor, p.high_freq_factor))
    original = _number(p.original_max_position_embeddings)
    freq = rope.theta**-exponents
    smooth = np.clip((original * freq / (2 * math.pi) - low) / (high - low), 0.0, 1.0)
    return (1 - smooth) * freq / factor + smooth * freq, 1.0


def _yarn(rope: RopeConfig, exponents: npt.NDArray[np.float64], seq_len: int) -> Result:
    """YaRN (arXiv:2309.00071): interpolate low frequencies, extrapolate high ones, scale the attention."""
    p = rope.params
    original, factor, attention = (
        _number(p.original_max_position_embeddings),
        _number(p.factor),
        p.attention_factor,
    )
    if attention is None and p.mscale and p.mscale_all_dim:
        attention = _mscale(factor, p.mscale) / _mscale(factor, p.mscale_all_dim)
    elif attention is None:
        attention = _mscale(factor)

    def channel(rotations: float) -> float:
        return rope.dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = channel(p.beta_fast or 32.0), channel(p.beta_slow or 1.0)
    if p.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = np.clip((np.arange(rope.dim // 2) - low) / (high - low or 0.001), 0.0, 1.0)
    freq = rope.theta**-exponents
    return freq / factor * ramp + freq * (1 - ramp), attention


def _mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(rope: RopeConfig, exponents: npt.NDArray[np.float64], seq_len: int) -> Result:
    """LongRoPE (arXiv:2402.13753): one factor per channel, another set beyond the original context."""
    p = rope.params
    original, attention = _number(p.original_max_position_embeddings), p.attention_factor
    factor = p.factor or rope.trained_positions / original
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    per_channel = p.long_factor if seq_len > original else p.short_factor
    return rope.theta**-exponents / np.asarray(per_channel, np.float64), attention


def _number(value: float | None) -> float:
    """A parameter that `RopeConfig.from_file` has found to be there."""
    assert value is not None
    return float(value)


Formula = Callable[[RopeConfig, npt.NDArray[np.float64], int], Result]
ROPE_TYPES: dict[str, tuple[Formula, tuple[str, ...]]] = {
    "default": (_default, ()),
    "linear": (_linear, ("factor",)),
    "dynamic": (_dynamic, ("factor",)),
    "yarn": (_yarn, ("factor",)),
    "longrope": (_longrope, ("short_factor", "long_factor")),
    "llama3": (_llama3, ("factor", "low_freq_factor", "high_freq_factor")),
}
