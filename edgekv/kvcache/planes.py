"""planes (ours): keys and values in 1 to 4 bits an element, keys around centres of 64 and 16 tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from edgekv.kernels.memory import to_host
from edgekv.kvcache.base import Geometry
from edgekv.kvcache.codec_planes import CentredPlanes, InterleavedValues, PlaneKeys, PlaneValues
from edgekv.kvcache.codecs import WORD, Codec, WindowCodecs, f16_codecs
from edgekv.kvcache.knobs import bad_knob, require_only
from edgekv.kvcache.windowed import Sizes, Windowed
from edgekv.types import F32

KEY_SCALES = {1: 0.9, 2: 0.95, 3: 1.0, 4: 1.0}
"""Of the estimated scores by bits of a key, where none is given: what diverged least (docs/quality.md)."""


@dataclasses.dataclass(frozen=True)
class PlanesKnobs:
    """What `planes` can be set to.

    k_bits: int, default 2. Bits of a key's element: 1, 2, 3 or 4.
    v_bits: int, default 2. Bits of a value's element: 1, 2, 3 or 4.
    threshold: float, default 0. If above 0, all keys are scored by their first bit alone, and tokens with this
        attention probability or more are read in full: k_bits and v_bits are 4 then. At most 1.
    sink: int, default 4. First tokens of the context that stay in f16.
    residual_length: int, default 128. Latest tokens that stay in f16, at least; packed 64 at a time.
    key_scale: float, default 0. Factor of the estimated scores, at most 2; 1 is unbiased, 0 takes the best for the
        bits: 0.9, 0.95, 1 and 1 for 1 to 4 bits, 0.9 with a threshold.
    seed: int, default 0. Of the random rotation of keys and values.
    """

    scheme: ClassVar[str] = "planes"
    aliases: ClassVar[dict[str, str]] = {
        "window": "residual_length",
        "v": "v_bits",
        "lam": "key_scale",
        "p": "threshold",
    }
    retired: ClassVar[tuple[str, ...]] = ("planes",)

    k_bits: int = 2
    v_bits: int = 2
    threshold: float = 0.0
    sink: int = 4
    residual_length: int = 128
    key_scale: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("k_bits", "v_bits"):
            if getattr(self, name) not in (1, 2, 3, 4):
                raise bad_knob(self.scheme, name, getattr(self, name), 1, 2, 3, "4 bits")
        for name in ("sink", "residual_length"):
            if getattr(self, name) < 0:
                raise bad_knob(self.scheme, name, getattr(self, name), "0 or more tokens")
        if not 0 <= self.key_scale <= 2:
            raise bad_knob(self.scheme, "key_scale", self.key_scale, "at least 0 and at most 2")
        if not 0 <= self.threshold <= 1:
            raise bad_knob(self.scheme, "threshold", self.threshold, "a probability, or 0 for none")
        if self.threshold and (self.k_bits, self.v_bits) != (4, 4):
            raise bad_knob(self.scheme, "threshold", self.threshold, "with k_bits=4 and v_bits=4 only, else 0")


class Planes(Windowed):
    """q . k ~ (P q) . c + key_scale * f * (P q) . x: x are the levels of r = P k - c in k_bits an element.

    With D = head_dim and D' = D rounded up to a multiple of 64: k_bits * D'/8 + 2 + (D'/2 + 2) * 5/64 bytes of
    keys and v_bits * D/8 + 2 of values per packed token and KV head (73.2 at D = 128 with 2 and 2 bits), and 4
    * D for each of the sink and residual_length..residual_length + 63 exact tokens.

    P is a randomised Hadamard transform, c the mean of 16 tokens (that of 64 and a difference, 4 bits each), f
    = |r|_2 ** 2 / (r . x), as in RaBitQ (SIGMOD 2024): with 1 bit x = sign(r). Scores are looked up: four bits
    of a key choose one of 16 sums of four query elements. Values are the best uniform levels for a Gaussian,
    rotated too. An adapter brings trained ``key_scale``, one per KV head; with it a prompt too attends to what
    is packed. P depends on the seed alone and is not counted.

    With a ``threshold`` the first bit of each key scores all tokens. Those that reach that probability for a
    query head of the group have their scores corrected by the key's other bits, and their values are read in
    two bits, or in four at 2.8 times the threshold or more; all others count as their block's probability
    times the mean of 64 values. D'/2 + 2 + (D'/2 + 2) * 5/64 bytes of keys and D'/2 + 2 + (D'/2 + 2)/64 of
    values (138.2 at D = 128); a step reads D'/8 + 2 + (D'/2 + 2) * 6/64 of every token (24.2), the rest of
    few. A threshold on the probability spends no reads on heads that look at a few tokens, or at the exact
    ones, and bounds the error: what is not read has weights below it.
    """

    name = "planes"
    paper = "ours; estimator of RaBitQ"
    summary = "1- to 4-bit keys around 4-bit centres, 1- to 4-bit rotated values, first and last tokens exact"
    gives_up = "exact scores of all but the first and latest tokens; 2 bits of each cost a third of 1-bit keys"
    Knobs = PlanesKnobs
    lam_source = ""  # what it was adapted by

    @classmethod
    def window_codecs(cls, knobs: PlanesKnobs) -> WindowCodecs:
        return f16_codecs

    def exact_sizes(self, knobs: PlanesKnobs) -> Sizes:
        return Sizes(sink=knobs.sink, residual_length=knobs.residual_length, block=WORD)

    def codecs(self, geometry: Geometry, capacity: int, knobs: PlanesKnobs) -> tuple[Codec, Codec]:
        shape = geometry.n_kv_heads, capacity, geometry.head_dim
        self.keys: CentredPlanes
        if knobs.threshold:
            keys = self.keys = PlaneKeys(*shape, lam=knobs.key_scale or KEY_SCALES[1], seed=knobs.seed)
            return keys, PlaneValues(keys, n_rep=geometry.n_rep, threshold=knobs.threshold)
        lam = knobs.key_scale or KEY_SCALES[knobs.k_bits]
        self.keys = CentredPlanes(*shape, bits=knobs.k_bits, lam=lam, seed=knobs.seed)
        return self.keys, InterleavedValues(*shape, bits=knobs.v_bits, seed=knobs.seed)

    def adapt(self, parameters: Mapping[str, F32], source: str) -> None:
        """``lam`` () of all layers, or (1,) or (n_kv_heads,) of this one."""
        require_only("lam", parameters, self.name, source)
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

    def bytes_read(self) -> int:
        """With a threshold: as many tokens beyond the scan as the last queries chose, on average (or at most)."""
        if not isinstance(self.value_codec, PlaneValues):
            return super().bytes_read()
        left = min(self.n_seen, self.geometry.sliding_window or self.n_seen)
        recent = min(self.n_recent, left)
        packed = min(self.n_bulk, left - recent)
        sink = min(self.n_sink, left - recent - packed)
        exact = self._stores["recent_key"].token_bytes + self._stores["recent_value"].token_bytes
        scanned = -(-packed // WORD) * (self.keys.block_bytes + self.value_codec.block_bytes)
        return (recent + sink) * exact + scanned + self.value_codec.chosen_bytes(packed)
