"""onebit (ours): keys as a sign per element around centres of 16 tokens, queries in 4 bits, values in 2."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from edgekv.errors import CacheError
from edgekv.kvcache.base import F32, Geometry
from edgekv.kvcache.codec_planes import CentredSigns, QuadValues
from edgekv.kvcache.codecs import WORD, KeyCodec, ValueCodec
from edgekv.kvcache.windowed import Sizes, Windowed

F64 = npt.NDArray[np.float64]
FIT_QUERIES = 16
FIT_MIN_TOKENS = 4 * WORD  # packed
FIT_STEPS = 5
FIT_START, FIT_RANGE = 0.9, (0.6, 1.1)


@dataclasses.dataclass(frozen=True)
class OneBitKnobs:
    """``sink`` first and ``window`` latest tokens stay exact; ``v`` bits per value element, 1 to 4.

    ``lam`` shrinks the estimated scores (0: fit it per KV head on the prompt); ``planes`` of the query; ``seed``
    of the rotation.
    """

    sink: int = 4
    window: int = 128
    v: int = 2
    lam: float = 0.9
    planes: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        check_exact_tokens("onebit", self.sink, self.window)
        if self.v not in (1, 2, 3, 4):
            raise CacheError(f"--kv onebit:v={self.v}: accepted: 1, 2, 3 or 4 bits")
        if not 0 <= self.lam <= 2:
            raise CacheError(f"--kv onebit:lam={self.lam}: accepted: up to 2, or 0 to fit it on the prompt")
        if not 3 <= self.planes <= 8:
            raise CacheError(f"--kv onebit:planes={self.planes}: accepted: 3 to 8")


def check_exact_tokens(scheme: str, sink: int, window: int) -> None:
    if sink < 0:
        raise CacheError(f"--kv {scheme}:sink={sink}: accepted: 0 or more tokens")
    if window < 0:
        raise CacheError(f"--kv {scheme}:window={window}: accepted: 0 or more tokens")


class OneBit(Windowed):
    """q . k ~ (P q) . c + lam * f * (P q) . sign(P k - c): one bit per key element, and the query keeps four.

    With D = head_dim and D' = D rounded up to a multiple of 64: D'/8 + 2 + (D'/2 + 2)/16 bytes of keys and
    v * D/8 + 2 of values per packed token and KV head (56.1 at D = 128, v = 2), and 4 * D for each of the sink and
    window..window + 63 exact tokens.

    The estimator is RaBitQ's (SIGMOD 2024), around a centre c of 16 tokens: P is a randomised Hadamard transform,
    f = |r|_2 ** 2 / |r|_1 of r = P k - c. H1B-KV also keeps one bit per key element, but binarises the query too;
    here the query has 4 bit planes, and a score is 4 D' bits of AND, XOR and popcount. What H1B-KV's
    temperature learns is ``lam``. P depends on the seed alone and is not counted.
    """

    name = "onebit"
    paper = "ours; estimator of RaBitQ"
    summary = "1-bit keys around 4-bit centres, 4-bit queries, 2-bit rotated values, first and last tokens exact"
    gives_up = "the exact scores of all but the first and latest tokens (0.5 to 2% of perplexity)"
    Knobs = OneBitKnobs

    def window_sizes(self, knobs: OneBitKnobs) -> Sizes:
        return Sizes(sink=knobs.sink, window=knobs.window, block=WORD)

    def codecs(self, geometry: Geometry, capacity: int, knobs: OneBitKnobs) -> tuple[KeyCodec, ValueCodec]:
        shape = geometry.n_kv_heads, capacity, geometry.head_dim
        self.keys = CentredSigns(*shape, planes=knobs.planes, lam=knobs.lam or FIT_START, seed=knobs.seed)
        return self.keys, QuadValues(*shape, bits=knobs.v, seed=knobs.seed)

    def bytes_read(self) -> int:
        return super().bytes_read()

    def prefill(self, queries: F32, keys: F32, values: F32) -> None:
        self.extend(keys, values)
        if not self.knobs.lam and self.n_bulk >= FIT_MIN_TOKENS:
            self.keys.lam[:] = self._fit(queries, keys)

    def _fit(self, queries: F32, keys: F32) -> F64:
        """Per KV head the lam whose attention has the least cross-entropy to the exact one, by Newton's method.

        Over queries among the last tokens, which see all that is packed, and the packed tokens alone.
        """
        g = self.geometry.n_kv_heads
        first, n = self.n_sink, self.n_bulk
        sample = np.linspace(first + n, queries.shape[1] - 1, FIT_QUERIES).astype(int)
        q = queries[:, sample].reshape(g, -1, self.geometry.head_dim)  # (g, group * FIT_QUERIES, head_dim)
        exact = q @ keys[:, first : first + n].transpose(0, 2, 1)
        parts = np.empty((2, *exact.shape), np.float32)
        for lam, part in zip((0, 1), parts, strict=True):
            self.keys.lam[:] = lam
            self.keys.scores(q, 0, n, part, 0)
        base, estimate = parts[0], parts[1] - parts[0]
        target = (_softmax(exact) * estimate).sum(axis=2)
        fitted = np.full(g, FIT_START)
        for _ in range(FIT_STEPS):
            p = _softmax(base + fitted[:, None, None].astype(np.float32) * estimate)
            mean = (p * estimate).sum(axis=2)
            variance = (p * estimate**2).sum(axis=2) - mean**2
            step = (mean - target).sum(axis=1) / np.maximum(variance.sum(axis=1), 1e-9)
            fitted = np.clip(fitted - step, *FIT_RANGE)
        return fitted

    def notes(self) -> list[str]:
        if self.knobs.lam:
            return []
        lam = self.keys.lam
        return [f"onebit: lam {lam.min():.2f} to {lam.max():.2f} in the first layer, fitted on the prompt"]


def _softmax(s: F32) -> F32:
    weights = np.exp(s - s.max(axis=2, keepdims=True))
    normalised: F32 = weights / weights.sum(axis=2, keepdims=True)
    return normalised
