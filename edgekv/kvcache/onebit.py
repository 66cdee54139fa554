"""onebit (ours): keys as a sign per element around centres of 64 and 16 tokens, queries in 5 bits, values in 2."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from edgekv.errors import CacheError
from edgekv.kernels.memory import to_host
from edgekv.kvcache.base import Geometry
from edgekv.kvcache.codec_planes import CentredSigns, InterleavedValues
from edgekv.kvcache.codecs import WORD, Codec
from edgekv.kvcache.knobs import bad_knob
from edgekv.kvcache.windowed import Sizes, Windowed
from edgekv.types import F32


@dataclasses.dataclass(frozen=True)
class OneBitKnobs:
    """What `onebit` can be set to.

    sink: int, default 4. First tokens of the context that stay in f16.
    residual_length: int, default 128. Latest tokens that stay in f16, at least; packed 64 at a time.
    v_bits: int, default 2. Bits of a value's element: 1, 2, 3 or 4.
    key_scale: float, default 0.9. Factor of the estimated scores, above 0 and at most 2; 1 is unbiased.
    planes: int, default 5. Bits that a query's elements are rounded to for the scores, 3 to 8.
    seed: int, default 0. Of the random rotation of keys and values.
    """

    aliases: ClassVar[dict[str, str]] = {"window": "residual_length", "v": "v_bits", "lam": "key_scale"}

    sink: int = 4
    residual_length: int = 128
    v_bits: int = 2
    key_scale: float = 0.9
    planes: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        check_exact_tokens("onebit", self.sink, self.residual_length)
        check_estimator("onebit", self.key_scale, self.planes)
        if self.v_bits not in (1, 2, 3, 4):
            raise bad_knob("onebit", "v_bits", self.v_bits, 1, 2, 3, "4 bits")


def check_exact_tokens(scheme: str, sink: int, residual_length: int) -> None:
    if sink < 0:
        raise bad_knob(scheme, "sink", sink, "0 or more tokens")
    if residual_length < 0:
        raise bad_knob(scheme, "residual_length", residual_length, "0 or more tokens")


def check_estimator(scheme: str, key_scale: float, planes: int) -> None:
    if not 0 < key_scale <= 2:
        raise bad_knob(scheme, "key_scale", key_scale, "more than 0 and at most 2")
    if not 3 <= planes <= 8:
        raise bad_knob(scheme, "planes", planes, "3 to 8")


class OneBit(Windowed):
    """q . k ~ (P q) . c + lam * f * (P q) . sign(P k - c): one bit per key element, and the query keeps five.

    With D = head_dim and D' = D rounded up to a multiple of 64: D'/8 + 2 + (D'/2 + 2) * 5/64 bytes of
    keys and v_bits * D/8 + 2 of values per packed token and KV head (57.2 at D = 128, v_bits = 2), and 4 * D for
    each of the sink and residual_length..residual_length + 63 exact tokens.

    The estimator is RaBitQ's (SIGMOD 2024), around a centre c of 16 tokens (the mean of 64 and a
    difference, 4 bits each): P is a randomised Hadamard transform,
    f = |r|_2 ** 2 / |r|_1 of r = P k - c. H1B-KV also keeps one bit per key element, but binarises the query too;
    here the query has 5 bit planes, and a score is XOR and popcount of 5 D' bits. ``key_scale``, which H1B-KV's
    learned temperature corresponds to, is 0.9 for all heads: fitted per head on the prompt (least cross-entropy)
    it was no better. An adapter brings trained ones, one per KV head; with it a prompt too attends to what is
    packed. P depends on the seed alone and is not counted.
    """

    name = "onebit"
    paper = "ours; estimator of RaBitQ"
    summary = "1-bit keys around 4-bit centres, 5-bit queries, 2-bit rotated values, first and last tokens exact"
    gives_up = "exact scores of all but the first and latest tokens (0.5 to 2.5% of perplexity; 5 on foreign text)"
    Knobs = OneBitKnobs
    lam_source = ""  # what it was adapted by

    def exact_sizes(self, knobs: OneBitKnobs) -> Sizes:
        return Sizes(sink=knobs.sink, residual_length=knobs.residual_length, block=WORD)

    def codecs(self, geometry: Geometry, capacity: int, knobs: OneBitKnobs) -> tuple[Codec, Codec]:
        shape = geometry.n_kv_heads, capacity, geometry.head_dim
        self.keys = CentredSigns(*shape, planes=knobs.planes, lam=knobs.key_scale, seed=knobs.seed)
        return self.keys, InterleavedValues(*shape, bits=knobs.v_bits, seed=knobs.seed)

    def adapt(self, parameters: Mapping[str, F32], source: str) -> None:
        """``lam`` () of all layers, or (1,) or (n_kv_heads,) of this one."""
        unknown = sorted(parameters.keys() ^ {"lam"})
        if unknown:
            raise CacheError(
                f"{source}: kv={self.name!r} takes lam and nothing else, not {', '.join(unknown)}",
                field="adapter",
                value=unknown,
                accepted=["lam"],
            )
        self.exact_prefill = False
        self.keys.lam[:] = parameters["lam"]
        self.lam_source = source

    def fitted(self) -> dict[str, Any]:
        return {"lam": to_host(self.keys.lam).tolist(), "lam_source": self.lam_source} if self.lam_source else {}

    def load_fitted(self, fitted: Mapping[str, Any]) -> None:
        if fitted:
            self.exact_prefill = False
            self.keys.lam[:] = np.asarray(np.array(fitted["lam"], np.float32), like=self.keys.lam)
            self.lam_source = fitted["lam_source"]

    def notes(self) -> list[str]:
        if not self.lam_source:
            return []
        lam = to_host(self.keys.lam)
        shown = " to ".join(f"{end:.3g}" for end in sorted({lam.min(), lam.max()}))
        return [f"{self.name}: lam {shown} in layer {self.geometry.layer} ({self.lam_source})"]
