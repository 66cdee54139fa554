"""Rotary position embedding: frequencies of every rope_scaling type in use, and the cos/sin tables.

Formulas and defaults follow transformers' modeling_rope_utils (checked against it by the golden logits).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from edgekv.checks import read_fields
from edgekv.errors import ConfigError

F64 = npt.NDArray[np.float64]
Raw = Mapping[str, Any]
Positions = Annotated[int, Meta(ge=1, le=1 << 28)]
Factor = Annotated[float, Meta(gt=1e-6, le=1e6)]
Share = Annotated[float, Meta(gt=0, le=1)]
Theta = Annotated[float, Meta(gt=1, le=1e15)]


class RopeSchema(Struct):
    """The fields of rope_scaling and rope_parameters of all types; ROPE_TYPES has those that each type needs."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Theta | None = None
    factor: Factor | None = None
    original_max_position_embeddings: Positions | None = None
    low_freq_factor: Factor | None = None
    high_freq_factor: Factor | None = None
    attention_factor: Factor | None = None
    beta_fast: Factor | None = None
    beta_slow: Factor | None = None
    mscale: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    mscale_all_dim: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    truncate: bool | None = None
    partial_rotary_factor: Share | None = None
    llama_4_scaling_beta: Annotated[float, Meta(ge=0, le=1e3)] | None = None
    short_factor: list[Factor] | None = None
    long_factor: list[Factor] | None = None


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary settings: ``dim`` rotated channels per head, base ``theta``, scaling ``kind`` and its parameters.

    ``max_positions`` is the longest context that the scaling is meant for. Where ``query_growth`` is not 0, the
    query at position p is multiplied by 1 + query_growth * log(1 + p // original length), as in Llama 4.
    """

    dim: int
    theta: float
    kind: str
    trained_positions: int
    max_positions: int
    params: RopeSchema
    query_growth: float = 0.0

    @classmethod
    def of(
        cls, raw: Raw, name: str, dim: int, positions: int, theta: float, original: int | None = None
    ) -> RopeConfig:
        """Reads the object ``name`` of config.json. theta: where it has none. original: length, before its own.

        Raises ConfigError for an unknown scaling type, a missing parameter or ones that contradict each other.
        """
        params = read_fields(raw, RopeSchema, f"config.json: {name}")
        kind = params.rope_type or params.type or "default"
        kind = {"su": "longrope", "mrope": "default"}.get(kind, kind)
        if kind not in ROPE_TYPES:
            known = ", ".join(ROPE_TYPES)
            raise ConfigError(f"config.json: {name} type {kind!r} is not supported; supported: {known}")
        original = original or params.original_max_position_embeddings or positions
        if kind == "yarn" and params.factor is None and "factor" in raw:
            params.factor = positions / original  # null
        for needed in ROPE_TYPES[kind][1]:
            if getattr(params, needed) is None:
                raise ConfigError(f"config.json: {name} of type {kind!r} needs {needed!r}, a number")
        if dim % 2 or not dim:
            raise ConfigError(f"config.json: {dim} channels of a head can't be rotated; the number must be even")
        params.original_max_position_embeddings = original
        _require_together(name, kind, params, dim)
        reach, factor = positions, params.factor or 1.0
        if kind == "linear":
            reach = max(1, int(positions * factor))
        elif kind == "yarn":
            reach = max(positions, int(original * factor))
        growth = params.llama_4_scaling_beta or 0.0
        return cls(dim, params.rope_theta or theta, kind, positions, reach, params, growth)

    @property
    def factor(self) -> float:
        """Ratio of the longest context to that before scaling."""
        return self.params.factor or 1.0

    @property
    def original(self) -> int:
        """Longest context before scaling, in tokens."""
        return self.params.original_max_position_embeddings or self.trained_positions

    @property
    def fixed_up_to(self) -> float:
        """Length of a sequence beyond which other frequencies hold."""
        return self.original if self.kind == "longrope" else math.inf

    def rope_invalidates_keys(self, before: int, after: int) -> bool:
        """Whether the keys of ``before`` tokens must be computed again when the sequence has ``after``.

        So with longrope, whose two sets of frequencies do not go together.
        """
        return before > 0 and (before > self.fixed_up_to) != (after > self.fixed_up_to)


def _require_together(name: str, kind: str, params: RopeSchema, dim: int) -> None:
    """Raises ConfigError where parameters of a type contradict each other."""
    low, high = params.low_freq_factor or 0.0, params.high_freq_factor or 0.0
    wrong = ""
    if kind == "llama3" and high <= low:
        wrong = f"{name} has high_freq_factor {high:g}; accepted: more than low_freq_factor, {low:g}"
    elif kind == "longrope":
        if params.original_max_position_embeddings == 1:
            wrong = f"{name} of type 'longrope' can't have an original length of 1 token"
        for side in ("long_factor", "short_factor"):
            if (n := len(getattr(params, side))) != dim // 2:
                wrong = f"{name} has {n} entries in {side}; {dim} rotated channels need {dim // 2}"
    if wrong:
        raise ConfigError(f"config.json: {wrong}")


def frequencies(rope: RopeConfig, seq_len: int) -> tuple[F64, float]:
    """Returns inverse frequencies (dim / 2,) for ``seq_len`` tokens, and the factor on cos and sin."""
    freq = rope.theta ** -(np.arange(0, rope.dim, 2) / rope.dim)
    return ROPE_TYPES[rope.kind][0](rope, freq, seq_len)


def _llama3(rope: RopeConfig, freq: F64, seq_len: int) -> tuple[F64, float]:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a smooth blend between."""
    factor, low, high = rope.factor, rope.params.low_freq_factor or 0.0, rope.params.high_freq_factor or 0.0
    smooth = np.clip((rope.original * freq / (2 * math.pi) - low) / (high - low), 0.0, 1.0)
    return (1 - smooth) * freq / factor + smooth * freq, 1.0


def _yarn(rope: RopeConfig, freq: F64, seq_len: int) -> tuple[F64, float]:
    """YaRN (arXiv:2309.00071): interpolate low frequencies, extrapolate high ones, scale the attention."""
    p, factor, attention = rope.params, rope.factor, rope.params.attention_factor
    if attention is None and p.mscale and p.mscale_all_dim:
        attention = _mscale(factor, p.mscale) / _mscale(factor, p.mscale_all_dim)
    elif attention is None:
        attention = _mscale(factor)

    def channel(rotations: float) -> float:
        return rope.dim * math.log(rope.original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = channel(p.beta_fast or 32.0), channel(p.beta_slow or 1.0)
    if p.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = np.clip((np.arange(rope.dim // 2) - low) / (high - low or 0.001), 0.0, 1.0)
    return freq / factor * ramp + freq * (1 - ramp), attention


def _mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(rope: RopeConfig, freq: F64, seq_len: int) -> tuple[F64, float]:
    """LongRoPE (arXiv:2402.13753): one factor per channel, another set beyond the original context."""
    p, factor = rope.params, rope.params.factor or rope.trained_positions / rope.original
    attention = p.attention_factor
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(rope.original))
    return freq / np.asarray(p.long_factor if seq_len > rope.original else p.short_factor, np.float64), attention


ROPE_TYPES: dict[str, tuple[Callable[[RopeConfig, F64, int], tuple[F64, float]], tuple[str, ...]]] = {
    "default": (lambda rope, freq, seq_len: (freq, 1.0), ()),
    "linear": (lambda rope, freq, seq_len: (freq / rope.factor, 1.0), ("factor",)),
    "yarn": (_yarn, ("factor",)),
    "longrope": (_longrope, ("short_factor", "long_factor")),
    "llama3": (_llama3, ("factor", "low_freq_factor", "high_freq_factor")),
}
"""The formula of each type, and the parameters that it needs."""
