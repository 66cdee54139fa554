"""bitplane (ours): 4-bit keys and values in planes; signs score every token, the rest is read where it matters."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from edgekv.kvcache.base import Geometry
from edgekv.kvcache.codec_planes import PlaneKeys, PlaneValues
from edgekv.kvcache.codecs import WORD, Codec
from edgekv.kvcache.knobs import bad_knob
from edgekv.kvcache.onebit import check_estimator, check_exact_tokens
from edgekv.kvcache.windowed import Sizes, Windowed


@dataclasses.dataclass(frozen=True)
class BitPlaneKnobs:
    """What `bitplane` can be set to.

    threshold: float, default 2.5e-4. Tokens with this attention probability or more, as estimated from the keys'
        signs, are read in full: fewer than 1 / threshold for each query head. Above 0, at most 1.
    sink: int, default 4. First tokens of the context that stay in f16.
    residual_length: int, default 32. Latest tokens that stay in f16, at least; packed 64 at a time.
    key_scale: float, default 0.9. Factor of the estimated scores, above 0 and at most 2; 1 is unbiased.
    planes: int, default 5. Bits that a query's elements are rounded to for the scores, 3 to 8.
    seed: int, default 0. Of the random rotation of keys and values.
    """

    aliases: ClassVar[dict[str, str]] = {"window": "residual_length", "p": "threshold", "lam": "key_scale"}

    threshold: float = 2.5e-4
    sink: int = 4
    residual_length: int = 32
    key_scale: float = 0.9
    planes: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        check_exact_tokens("bitplane", self.sink, self.residual_length)
        check_estimator("bitplane", self.key_scale, self.planes)
        if not 0 < self.threshold <= 1:
            raise bad_knob("bitplane", "threshold", self.threshold, "a probability, more than 0 and at most 1")


class BitPlane(Windowed):
    """`onebit`'s scan of all tokens' key signs, then all planes of the tokens that it finds to matter.

    With D = head_dim rounded up to a multiple of 64: D/2 + 2 + (D/2 + 2) * 5/64 bytes of keys and
    D/2 + 2 + (D/2 + 2)/64 of values per packed token and KV head (138.2 at D = 128), 4 * head_dim for each exact
    token. A step reads D/8 + 2 + (D/2 + 2) * 6/64 bytes of every token (24.2), the other planes of few.

    1. Scores from the sign plane, around centres (`CentredSigns`); softmax over these and the exact tokens.
    2. Tokens with a probability of ``threshold`` or more for a query head of the group: scores corrected by the
       key's lower planes; values from two planes, or all four if the probability is 2.8 times that or more.
    3. All others: their blocks' probability times the mean value of 64 tokens.

    A threshold on the probability spends no reads on heads that look at a few tokens, or at the exact ones, and
    bounds the error: what is not read has weights below it, and the sum of their squares is too.
    """

    name = "bitplane"
    paper = "ours"
    summary = "4-bit rotated keys and values in bit planes; keys' signs scanned, the rest read where needed"
    gives_up = "the exact weights of unlikely tokens, and their values within a block"
    Knobs = BitPlaneKnobs

    def exact_sizes(self, knobs: BitPlaneKnobs) -> Sizes:
        return Sizes(sink=knobs.sink, residual_length=knobs.residual_length, block=WORD)

    def codecs(self, geometry: Geometry, capacity: int, knobs: BitPlaneKnobs) -> tuple[Codec, Codec]:
        shape = geometry.n_kv_heads, capacity, geometry.head_dim
        self.keys = PlaneKeys(*shape, planes=knobs.planes, lam=knobs.key_scale, seed=knobs.seed)
        self.values = PlaneValues(self.keys, n_rep=geometry.n_rep, threshold=knobs.threshold)
        return self.keys, self.values

    def bytes_read(self) -> int:
        """As many tokens beyond the scan as the last queries chose, on average (before the first: at most)."""
        left = min(self.n_seen, self.geometry.sliding_window or self.n_seen)
        recent = min(self.n_recent, left)
        packed = min(self.n_bulk, left - recent)
        sink = min(self.n_sink, left - recent - packed)
        exact = self._stores["recent_key"].token_bytes + self._stores["recent_value"].token_bytes
        scanned = -(-packed // WORD) * (self.keys.block_bytes + self.values.block_bytes)
        return (recent + sink) * exact + scanned + self.values.chosen_bytes(packed)
