"""bitplane (ours): 4-bit keys and values in planes; signs score every token, the rest is read where it matters."""

from __future__ import annotations

import dataclasses

from edgekv.errors import CacheError
from edgekv.kvcache.base import Geometry
from edgekv.kvcache.codec_planes import PlaneKeys, PlaneValues
from edgekv.kvcache.codecs import WORD, Codec
from edgekv.kvcache.onebit import check_estimator, check_exact_tokens
from edgekv.kvcache.windowed import Sizes, Windowed


@dataclasses.dataclass(frozen=True)
class BitPlaneKnobs:
    """Tokens with an estimated probability of ``p`` or more are read: fewer than 1/p for each query head.

    ``sink`` first and ``window`` latest tokens stay exact; ``lam`` shrinks the estimated scores; ``planes`` of the
    query; ``seed`` of the rotation.
    """

    p: float = 2.5e-4
    sink: int = 4
    window: int = 32
    lam: float = 0.9
    planes: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        check_exact_tokens("bitplane", self.sink, self.window)
        check_estimator("bitplane", self.lam, self.planes)
        if not 0 < self.p <= 1:
            raise CacheError(f"--kv bitplane:p={self.p}: accepted: a probability, more than 0 and at most 1")


class BitPlane(Windowed):
    """`onebit`'s scan of all tokens' key signs, then all planes of the tokens that it finds to matter.

    With D = head_dim rounded up to a multiple of 64: D/2 + 2 + (D/2 + 2) * 5/64 bytes of keys and
    D/2 + 2 + (D/2 + 2)/64 of values per packed token and KV head (138.2 at D = 128), 4 * head_dim for each exact
    token. A step reads D/8 + 2 + (D/2 + 2) * 6/64 bytes of every token (24.2), the other planes of few.

    1. Scores from the sign plane, around centres (`CentredSigns`); softmax over these and the exact tokens.
    2. Tokens with a probability of ``p`` or more for a query head of the group: scores corrected by the key's
       lower planes; values from two planes, or all four if the probability is 2.8 p or more.
    3. All others: their blocks' probability times the mean value of 64 tokens.

    A threshold on the probability spends no reads on heads that look at a few tokens, or at the exact ones, and
    bounds the error: what is not read has weights w < p, hence sum w ** 2 < p.
    """

    name = "bitplane"
    paper = "ours"
    summary = "4-bit rotated keys and values in bit planes; keys' signs scanned, the rest read where needed"
    gives_up = "the exact weights of unlikely tokens, and their values within a block"
    Knobs = BitPlaneKnobs

    def window_sizes(self, knobs: BitPlaneKnobs) -> Sizes:
        return Sizes(sink=knobs.sink, window=knobs.window, block=WORD)

    def codecs(self, geometry: Geometry, capacity: int, knobs: BitPlaneKnobs) -> tuple[Codec, Codec]:
        shape = geometry.n_kv_heads, capacity, geometry.head_dim
        self.keys = PlaneKeys(*shape, planes=knobs.planes, lam=knobs.lam, seed=knobs.seed)
        self.values = PlaneValues(self.keys, group=geometry.group, threshold=knobs.p)
        return self.keys, self.values

    def bytes_read(self) -> int:
        """As many tokens beyond the scan as the last queries chose, on average (before the first: at most)."""
        left = min(self.n_seen, self.geometry.window or self.n_seen)
        recent = min(self.n_recent, left)
        packed = min(self.n_bulk, left - recent)
        sink = min(self.n_sink, left - recent - packed)
        exact = self._stores["recent_key"].token_bytes + self._stores["recent_value"].token_bytes
        scanned = -(-packed // WORD) * (self.keys.block_bytes + self.values.block_bytes)
        return (recent + sink) * exact + scanned + self.values.chosen_bytes(packed)
