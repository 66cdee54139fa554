"""H1B-KV (arXiv text in the docs): 1-bit sketched keys and queries, 4-bit values, softmax temperature tau."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgekv.errors import CacheError
from edgekv.kvcache.base import F32, Geometry
from edgekv.kvcache.codecs import Int4, KeyCodec, SignSketch, ValueCodec
from edgekv.kvcache.keepall import KeepAll

DEFAULT_TAU = 0.05  # the best global value measured without adaptation
FIT_QUERIES = 16
FIT_MIN_TOKENS = 32
FIT_TAUS = np.geomspace(0.01, 0.5, 24).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class H1BKnobs:
    """``b``: sketch bits, a multiple of 64; ``tau``: softmax temperature (0: fit on the prompt); ``seed`` of R."""

    b: int = 256
    tau: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.b % 64 or not 64 <= self.b <= 512:
            raise CacheError(f"--kv h1b:b={self.b}: accepted: multiples of 64 from 64 to 512")
        if self.tau < 0:
            raise CacheError(
                f"--kv h1b:tau={self.tau}: accepted: a positive temperature, or 0 to fit it on the prompt"
            )


class H1B(KeepAll):
    """softmax((1/b) sign(Rq) . sign(Rk) / tau) V: b/8 + head_dim/2 + 3 bytes per token and KV head.

    R is one Gaussian (b, head_dim) matrix from ``seed``, the same for all layers and heads, and not counted.
    As in the paper there is no exact window and one global tau. Without an adapter, tau is fitted on the
    prompt: the value that makes the binary attention's cross-entropy to the exact one smallest, summed over
    all layers and heads.
    """

    name = "h1b"
    paper = "H1B-KV, eq. 2-5"
    summary = "1-bit Gaussian sketches of keys and queries, 4-bit values"
    gives_up = "untuned, perplexity about 4 times dense's: the binarised query loses most of the score"
    Knobs = H1BKnobs

    def __init__(self, geometry: Geometry, knobs: H1BKnobs) -> None:
        super().__init__(geometry, knobs)
        self.tau_source = "set by tau=" if knobs.tau else "default, no prompt was long enough to fit it"
        self._set_tau(knobs.tau or DEFAULT_TAU)
        self._fit_losses: npt.NDArray[np.float64] | None = None

    def codecs(self, geometry: Geometry, knobs: H1BKnobs) -> tuple[KeyCodec, ValueCodec]:
        shape = geometry.n_kv_heads, geometry.capacity, geometry.head_dim
        if geometry.head_dim % 2:
            raise CacheError(f"--kv h1b packs two values to a byte: head_dim {geometry.head_dim} must be even")
        self.sketch = SignSketch(*shape, knobs.b, knobs.seed)
        return self.sketch, Int4(*shape)

    @property
    def tau(self) -> float:
        return self.sketch.tau

    def _set_tau(self, tau: float) -> None:
        self.sketch.tau = tau

    def prefill(self, queries: F32, keys: F32, values: F32) -> None:
        self.extend(keys, values)
        if not self.knobs.tau and keys.shape[1] >= FIT_MIN_TOKENS:
            self._fit_losses = self._losses(queries, keys)

    def _losses(self, queries: F32, keys: F32) -> npt.NDArray[np.float64]:
        """Cross-entropy of the binary to the exact attention at each of FIT_TAUS, over sampled queries."""
        n = queries.shape[1]
        g, group, b = self.geometry.n_kv_heads, self.geometry.group, self.knobs.b
        losses = np.zeros(len(FIT_TAUS))
        for t in np.linspace(n // 2, n - 1, FIT_QUERIES).astype(int):
            lo = 0 if self.geometry.window is None else max(0, t + 1 - self.geometry.window)
            q = queries[:, t].reshape(g, group, -1)
            exact = q @ keys[:, lo : t + 1].transpose(0, 2, 1)  # (g, group, tokens)
            exact = np.exp(exact - exact.max(-1, keepdims=True))
            exact /= exact.sum(-1, keepdims=True)
            alpha = np.empty_like(exact)
            signs = self.kernels.pack_sign_rows(q @ self.sketch.projection.T)
            self.kernels.scores_signs(signs, self.arrays["key.signs"], lo, int(t) + 1, 1.0 / b, alpha, 0)
            top = alpha.max(-1, keepdims=True)
            mean = (exact * alpha).sum(-1)
            for i, tau in enumerate(FIT_TAUS):
                log_z = np.log(np.exp((alpha - top) / tau).sum(-1)) + top[..., 0] / tau
                losses[i] += float((log_z - mean / tau).sum())
        return losses

    @classmethod
    def settle(cls, caches: Sequence[H1B]) -> None:
        """One tau for all layers, as in the paper: the grid value with the least summed loss."""
        fitted = [cache._fit_losses for cache in caches if cache._fit_losses is not None]
        if not fitted:
            return
        tau = float(FIT_TAUS[np.argmin(np.sum(fitted, axis=0))])
        for cache in caches:
            cache._set_tau(tau)
            cache.tau_source = f"fitted on the prompt's prefill ({cache.n_seen} tokens)"
            cache._fit_losses = None

    def notes(self) -> list[str]:
        return [
            f"h1b: tau {self.tau:.3g} ({self.tau_source}), b = {self.knobs.b}",
            "h1b: this model was not adapted to binary attention; expect poor text "
            "(measured on llama-40m: perplexity about 4 times dense's)",
        ]
