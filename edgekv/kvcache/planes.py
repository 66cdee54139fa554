"""planes and onebit (ours): keys as bit planes around centres, values in small rotated codes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from edgekv.codecs.codec import Codec, WindowCodecs
from edgekv.codecs.f16 import f16_codecs
from edgekv.codecs.planes import CentredPlanes, InterleavedValues
from edgekv.kernels import BLOCK
from edgekv.kernels.arrays import to_host
from edgekv.kvcache.cache import Geometry
from edgekv.kvcache.config import (
    Config,
    are_factors,
    bad_option,
    digit_string,
    flag,
    number,
    require_factors,
    require_only,
    seed,
    tokens,
)
from edgekv.kvcache.mixed_bits import (
    CHANNEL_GROUPS,
    MAX_BITS,
    MIN_BITS,
    UNIT_DIGIT,
    HeadNoise,
    channel_scales,
    even_bits,
    head_bits,
)
from edgekv.kvcache.policies import SinkWindowCache, Sizes
from edgekv.types import F32

KEY_SCALES = {1: 0.9, 2: 0.95, 3: 1.0, 4: 1.0}
"""Bits of a key -> default factor of its scores: what diverged least (docs/lab/quality.md)."""


@dataclasses.dataclass(frozen=True)
class PlanesConfig(Config):
    """The options of `planes`.

    k_bits: float, default 2. Bits of a key's element, 1 to 4. A fraction is the mean over all KV heads: each has
        1, 2, 3 or 4, more where the model needs them.
    v_bits: float, default 2. Bits of a value's element, likewise. Equal to k_bits, both are one mean: of all keys
        and values together.
    mixed_bits: bool, default False. Whether whole k_bits and v_bits are means, too.
    key_bits_per_head: digits, default none. Bits of the keys of each KV head, as given out, layer after layer.
    value_bits_per_head: digits, default none. Bits of the values of each KV head, likewise.
    key_channel_scales: digits, default none. Eight for each KV head, found likewise: 2 ** ((digit - 4) / 2) is the
        factor of its keys' channels in an eighth of RoPE's pairs.
    sink: int, default 4. First tokens of the context that stay in f16.
    residual_length: int, default 128. Latest tokens that stay in f16, at least; packed 64 at a time.
    key_scale: float, default 0. Factor of the estimated scores, at most 2; 1 is unbiased, 0 takes the best for the
        bits: 0.9, 0.95, 1 and 1 for 1 to 4 bits.
    seed: int, default 0. Seed of the random rotation of keys and values.
    """

    scheme: ClassVar[str] = "planes"
    derived: ClassVar[tuple[str, ...]] = ("key_bits_per_head", "value_bits_per_head", "key_channel_scales")

    k_bits: float = number(2.0, MIN_BITS, MAX_BITS, " bits")
    v_bits: float = number(2.0, MIN_BITS, MAX_BITS, " bits")
    sink: int = tokens(4)
    residual_length: int = tokens(128)
    key_scale: float = number(0.0, 0, 2)
    seed: int = seed()
    mixed_bits: bool = flag(False)
    key_bits_per_head: str = digit_string("1234", "digits from 1 to 4, one for each KV head of the model")
    value_bits_per_head: str = digit_string("1234", "digits from 1 to 4, one for each KV head of the model")
    key_channel_scales: str = digit_string("012345678", f"digits from 0 to 8, {CHANNEL_GROUPS} for each KV head")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("k_bits", "v_bits"):
            if getattr(self, name) % 1 == 0:
                object.__setattr__(self, name, int(getattr(self, name)))

    @property
    def needs_fit(self) -> bool:
        """Whether heads get bits of their own that were not given out yet."""
        is_mixed = self.mixed_bits or self.k_bits % 1 != 0 or self.v_bits % 1 != 0
        return is_mixed and not (self.key_bits_per_head and self.value_bits_per_head)

    def with_head_bits(
        self, noise: HeadNoise, sliding_windows: Sequence[int | None], head_dim: int
    ) -> PlanesConfig:
        """Returns these options with bits and channel scales given out by the measured noise of the heads.

        sliding_windows: of the layers, None for one that sees all tokens. Equal means are one, of keys and values
        together, where a bit of either takes the same bytes.
        """
        together = self.k_bits == self.v_bits and head_dim % BLOCK == 0
        keys, values = head_bits(noise, self.k_bits, self.v_bits, sliding_windows, together=together)
        is_scaled = (noise.scale_digits != UNIT_DIGIT).any()
        return dataclasses.replace(
            self,
            key_bits_per_head=keys,
            value_bits_per_head=values,
            key_channel_scales="".join(map(str, noise.scale_digits.ravel())) if is_scaled else "",
        )

    def notes(self) -> list[str]:
        """Returns a line where bits could not be given out."""
        note = "mixed bits could not be measured on this model: heads got theirs by their order alone"
        return [note] if self.needs_fit else []

    def layer_bits(self, geometry: Geometry) -> tuple[list[int], list[int]]:
        """Returns the bits of a layer's keys and values, for each KV head.

        Raises CacheError for digits of another number of heads.
        """
        n, first = geometry.n_layers * geometry.n_kv_heads, geometry.layer * geometry.n_kv_heads
        layer = []
        for name, mean in (("key_bits_per_head", self.k_bits), ("value_bits_per_head", self.v_bits)):
            digits = getattr(self, name)
            if digits and len(digits) != n:
                raise bad_option(self.scheme, name, digits, f"{n} digits, one for each KV head of this model")
            bits = [int(digit) for digit in digits] or even_bits(mean, n)
            layer.append(bits[first : first + geometry.n_kv_heads])
        return layer[0], layer[1]

    def layer_channel_scales(self, geometry: Geometry) -> F32:
        """Returns the factors (n_kv_heads, head_dim) of a layer's keys.

        Raises CacheError for digits of another number of heads.
        """
        shape = geometry.n_layers, geometry.n_kv_heads, CHANNEL_GROUPS
        n, given = math.prod(shape), self.key_channel_scales
        if given and len(given) != n:
            accepted = f"{n} digits, {CHANNEL_GROUPS} for each KV head of this model"
            raise bad_option(self.scheme, "key_channel_scales", given, accepted)
        digits = np.array([*map(int, given or str(UNIT_DIGIT) * n)], np.int64)
        return channel_scales(digits.reshape(shape)[geometry.layer], geometry.head_dim)


class Planes(SinkWindowCache):
    """A cache of keys and values in a few bits per element, between exact tokens at both ends.

    q . k ~ (P q) . c + key_scale * f * (P q) . x, where x are the levels of r = P k - c in k_bits an element.

    With D = head_dim and D' = D rounded up to a multiple of 64: k_bits * D'/8 + 2 + (D'/2 + 2) * 5/64 bytes of
    keys and v_bits * D/8 + 2 of values per packed token and KV head (73.2 at D = 128 with 2 and 2 bits), and 4
    * D for each of the sink and residual_length..residual_length + 63 exact tokens.

    P is a randomised Hadamard transform, c the mean of 16 tokens in two steps, f = |r|_2 ** 2 / (r . x), as in
    RaBitQ (SIGMOD 2024). With a fraction of bits, or ``mixed_bits``, heads have different whole bits
    (docs/lab/planes.md). An adapter brings trained ``key_scale``, one per KV head; with it a prompt too attends to
    what is packed.
    """

    name = "planes"
    paper = "ours; estimator of RaBitQ"
    summary = "1- to 4-bit keys around 4-bit centres, 1- to 4-bit rotated values, first and last tokens exact"
    tradeoff = "exact scores of all but the first and latest tokens; 2 bits of each cost a third of 1-bit keys"
    Config = PlanesConfig
    adapted_by = ""  # where a trained key_scale is from

    @classmethod
    def window_codecs(cls, config: PlanesConfig) -> WindowCodecs:
        return f16_codecs

    @classmethod
    def codecs_used(cls, config: PlanesConfig) -> set[type[Any]] | None:
        return super().codecs_used(
            dataclasses.replace(config, key_bits_per_head="", value_bits_per_head="", key_channel_scales="")
        )

    def exact_sizes(self, config: PlanesConfig) -> Sizes:
        return Sizes(sink=config.sink, residual_length=config.residual_length, block=BLOCK)

    def codecs(self, geometry: Geometry, capacity: int, config: PlanesConfig) -> tuple[Codec, Codec]:
        shape = geometry.n_kv_heads, capacity, geometry.head_dim
        k_bits, v_bits = config.layer_bits(geometry)
        self.keys = CentredPlanes(
            *shape,
            bits=k_bits,
            key_scale=[config.key_scale or KEY_SCALES[bits] for bits in k_bits],
            seed=config.seed,
            channel_scales=config.layer_channel_scales(geometry),
        )
        return self.keys, InterleavedValues(*shape, bits=v_bits, seed=config.seed)

    def load_adapter(self, parameters: Mapping[str, F32], source: str) -> None:
        """Takes ``key_scale``: () of all layers, or (1,) or (n_kv_heads,) of this one."""
        require_only("key_scale", parameters, self.name, source)
        require_factors("key_scale", parameters["key_scale"], len(self.keys.key_scale), source)
        self.exact_prefill = False
        self.keys.key_scale[:] = parameters["key_scale"]
        self.adapted_by = source

    def extra_state(self) -> dict[str, Any]:
        if not self.adapted_by:
            return {}
        return {"key_scale": to_host(self.keys.key_scale).tolist(), "adapted_by": self.adapted_by}

    def load_extra_state(self, extra: Mapping[str, Any]) -> None:
        if extra:
            self.exact_prefill = False
            scale = np.array(extra["key_scale"], np.float32)
            if not are_factors(scale):
                raise ValueError(f"key_scale {extra['key_scale']}")
            self.keys.key_scale[:] = np.asarray(scale, like=self.keys.key_scale)
            self.adapted_by = str(extra["adapted_by"])

    def notes(self) -> list[str]:
        notes = []
        if self.adapted_by:
            scale = to_host(self.keys.key_scale)
            shown = " to ".join(f"{end:.3g}" for end in sorted({scale.min(), scale.max()}))
            notes.append(f"{self.name}: key_scale {shown} in layer {self.geometry.layer} ({self.adapted_by})")
        if self.geometry.layer == 0:
            notes += self.config.notes()
        return notes


@dataclasses.dataclass(frozen=True)
class OneBitConfig(PlanesConfig):
    """`PlanesConfig` with k_bits=1 and key_scale=0.9."""

    scheme = "onebit"

    k_bits: float = number(1.0, MIN_BITS, MAX_BITS, " bits")
    key_scale: float = number(0.9, 0, 2)


class OneBit(Planes):
    """`planes:k_bits=1`: 57.2 bytes per packed token and KV head at head_dim 128.

    H1B-KV also keeps one bit per key element, but binarises the query too; here four signs look a sum of four
    query elements up, in 7 bits. ``key_scale``, which H1B-KV's learned temperature corresponds to, is 0.9 for all
    heads: fitted per head on the prompt (least cross-entropy) it was no better.
    """

    name = "onebit"
    version = 2  # planes in groups of 16 tokens
    summary = "1-bit keys around 4-bit centres, 2-bit rotated values, first and last tokens exact"
    tradeoff = "exact scores of all but the first and latest tokens (0.5 to 2.5% of perplexity; 5 on foreign text)"
    Config = OneBitConfig
