"""H1B-KV: 1-bit sketches of keys and queries, 4-bit values, and a softmax temperature tau.

Measured here (docs/papers.md): untrained, perplexity is 4.5 to 4.9 times dense's; after the paper's training 1.9
to 2.9 times, after our longest 1.08 to 1.10, where the paper reports 1.009. Its bytes are 14 times those
printed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from edgekv.codecs.codec import Codec
from edgekv.codecs.f16 import F16
from edgekv.kernels.arrays import contiguous, to_host
from edgekv.kernels.interface import bound_scores
from edgekv.kvcache.cache import Geometry
from edgekv.kvcache.config import (
    MAX_FACTOR,
    MIN_FACTOR,
    Config,
    are_factors,
    flag,
    number,
    one_of,
    require_factors,
    require_only,
    require_shape,
    seed,
)
from edgekv.kvcache.policies import FullCache
from edgekv.papers import require_whole_bytes
from edgekv.papers.h1b.codec import SignSketch
from edgekv.papers.int4 import Int4
from edgekv.types import F32

DEFAULT_TAU = 0.05  # the best global value measured without adaptation
FIT_QUERIES = 16
FIT_MIN_TOKENS = 32
FIT_TAUS = np.geomspace(0.01, 0.5, 24).astype(np.float32)
FIT_OVER = {"global": (0, 2, 3), "layer": (2, 3), "head": ()}  # axes summed of (layer, tau, KV head, query head)


@dataclasses.dataclass(frozen=True)
class SketchConfig(Config):
    """Options of `sign_keys`, which `h1b` has too.

    sketch_bits: int, default 256. Sign bits of a key, and of a query; a multiple of 64 from 64 to 512.
    tau: float, default 0. Softmax temperature; 0 fits it on the prompt.
    fit: str, default "global". What shares a fitted tau: global (all layers), layer (its heads) or head.
    seed: int, default 0. Seed of the random projection.
    """

    scheme: ClassVar[str] = "sign_keys"

    sketch_bits: int = one_of(256, range(64, 513, 64))
    tau: float = number(0.0, MIN_FACTOR, MAX_FACTOR, or_zero=True)
    fit: str = one_of("global", FIT_OVER)
    seed: int = seed()

    @property
    def f16_values(self) -> bool:
        """Returns whether values stay in f16: always, unless ``keys_only`` is an option and off."""
        return bool(getattr(self, "keys_only", True))


@dataclasses.dataclass(frozen=True)
class H1BConfig(SketchConfig):
    """Options of `SketchConfig`, and one more.

    keys_only: bool, default False. Whether values stay in f16 (the paper's Table V) instead of 4 bits.
    """

    scheme: ClassVar[str] = "h1b"

    keys_only: bool = flag(False)


class H1B(FullCache):
    """H1B-KV, equations 2 to 5: softmax((1/b) sign(Rq) . sign(Rk) / tau) V with b = sketch_bits.

    A token of a KV head takes b/8 + head_dim/2 + 3 bytes, with ``keys_only`` b/8 + 2 * head_dim. R is one
    Gaussian matrix (b, head_dim) from ``seed``, the same for all layers and heads, and not counted. As in the
    paper there is no exact window.

    The paper trains one global tau, and V_proj, for a model. Here that is an adapter: with one, the prompt too
    attends through the sketches, and it may bring a trained R of each layer and a centre of each head's keys,
    which is subtracted before projecting (exact attention would not change by it). Without an adapter tau is
    fitted on the prompt: the value with the least cross-entropy of the binary attention to the exact one, summed
    over all layers and heads, or (``fit``) for each by itself.
    """

    name = "h1b"
    version = 2
    paper = "H1B-KV, eq. 2-5"
    summary = "1-bit Gaussian sketches of keys and queries, 4-bit values"
    needs_prompt_queries = True
    tradeoff = "untuned, perplexity about 4 times dense's: the binarised query loses most of the score"
    Config: ClassVar[type[SketchConfig]] = H1BConfig

    def __init__(self, geometry: Geometry, config: SketchConfig) -> None:
        super().__init__(geometry, config)
        self.sketch.tau = np.full((geometry.n_kv_heads, geometry.n_rep), config.tau or DEFAULT_TAU, np.float32)
        self.tau_source = "set by tau=" if config.tau else "default, no prompt was long enough to fit it"
        self.tau_scope = ""  # " in layer 0" where the layers differ
        self.n_fitted = 0  # tokens of the prompt that tau was fitted on
        self._fit_losses: npt.NDArray[np.float64] | None = None
        self._unfitted = self._tau_state()

    def _tau_state(self) -> tuple[F32, str, str]:
        return self.tau.copy(), self.tau_source, self.tau_scope

    def codecs(self, geometry: Geometry, config: SketchConfig) -> tuple[Codec, Codec]:
        shape = geometry.n_kv_heads, geometry.capacity, geometry.head_dim
        self.sketch = SignSketch(*shape, config.sketch_bits, config.seed)
        if config.f16_values:
            return self.sketch, F16(*shape)
        require_whole_bytes("h1b", geometry.head_dim, 2)
        return self.sketch, Int4(*shape)

    @property
    def tau(self) -> F32:
        """Returns the temperatures (n_kv_heads, query heads that share a KV head)."""
        return self.sketch.tau

    def load_adapter(self, parameters: Mapping[str, F32], source: str) -> None:
        """Takes ``tau``, () of all layers, or (1,) or (n_heads,) of this one, unless it is set as an option.

        ``projection`` (sketch_bits, head_dim) and ``centre`` (n_kv_heads, head_dim) may come with it.
        """
        learned = {name: parameters[name] for name in ("projection", "centre") if name in parameters}
        require_only("tau", parameters.keys() - learned.keys(), self.name, source)
        require_factors("tau", parameters["tau"], self.tau.size, source)
        for name, x in learned.items():
            require_shape(name, x, source, getattr(self.sketch, name).shape)
        self.sketch.set_learned(learned.get("projection"), learned.get("centre"))
        self.exact_prefill = False
        if self.config.tau:
            return
        tau = parameters["tau"]
        self.tau[:] = tau if tau.size == 1 else tau.reshape(self.tau.shape)
        self.tau_source = source
        self.tau_scope = f" in layer {self.geometry.layer}" if tau.ndim else ""
        self._unfitted = self._tau_state()

    def recompute_from(self, n: int) -> int:
        """Returns 0 where tau was fitted on tokens that are dropped: no prompt's tau serves another one."""
        return n if n >= self.n_fitted else 0

    def truncate(self, n: int, n_same: int = 0) -> int:
        """Goes back to n tokens; at 0 the tau that was fitted on the conversation is forgotten."""
        n_seen = super().truncate(n, n_same)
        if not n_seen:
            self.n_fitted = 0
            self.tau[:], self.tau_source, self.tau_scope = self._unfitted
            self._fit_losses = None
        return n_seen

    def prefill(self, queries: F32, keys: F32, values: F32) -> None:
        """Takes a prompt's queries (n_heads, n, head_dim), keys and values (n_kv_heads, n, head_dim)."""
        self.append_prefill(keys, values)
        if not self.config.tau and keys.shape[1] >= FIT_MIN_TOKENS:
            self._fit_losses = self._losses(queries, keys)

    def _losses(self, queries: F32, keys: F32) -> npt.NDArray[np.float64]:
        """Returns the cross-entropy of the binary to the exact attention, summed over sampled queries.

        Shape (FIT_TAUS, n_kv_heads, query heads that share a KV head).
        """
        n = queries.shape[1]
        g, group = self.tau.shape
        losses = np.zeros_like(queries, np.float64, shape=(len(FIT_TAUS), g, group))
        for t in np.linspace(n // 2, n - 1, FIT_QUERIES).astype(int):
            lo = 0 if self.geometry.sliding_window is None else max(0, t + 1 - self.geometry.sliding_window)
            q = queries[:, t].reshape(g, group, -1)
            exact = q @ keys[:, lo : t + 1].transpose(0, 2, 1)  # (g, group, tokens)
            bound_scores(exact, self.geometry.score_cap)
            exact = np.exp(exact - exact.max(-1, keepdims=True))
            exact /= exact.sum(-1, keepdims=True)
            alpha = np.empty_like(exact)
            self.kernels.scores(self.sketch, contiguous(q), lo, int(t) + 1, alpha)
            alpha *= np.asarray(self.tau[..., None], like=alpha)
            for i, tau in enumerate(FIT_TAUS):
                scores = alpha / tau
                bound_scores(scores, self.geometry.score_cap)
                top = scores.max(-1, keepdims=True)
                losses[i] += np.log(np.exp(scores - top).sum(-1)) + top[..., 0] - (exact * scores).sum(-1)
        return to_host(losses)

    @classmethod
    def finish_prefill(cls, caches: Sequence[H1B]) -> None:
        """Sets the tau with the least loss: one for all layers, as in the paper, or as ``fit`` says."""
        losses = [cache._fit_losses for cache in caches if cache._fit_losses is not None]
        if not losses:
            return
        fit = caches[0].config.fit
        summed = np.sum(losses, axis=FIT_OVER[fit], keepdims=True)  # (layers or 1, taus, g or 1, group or 1)
        best = FIT_TAUS[summed.argmin(axis=1)]
        for i, cache in enumerate(caches):
            cache.tau[:] = best[i % len(best)]
            cache.n_fitted = cache.n_seen
            cache.tau_source = f"fitted on the prompt's prefill ({cache.n_seen} tokens)"
            cache.tau_scope = "" if fit == "global" else f" in layer {cache.geometry.layer}"
            cache._fit_losses = None

    def counters_valid(self) -> bool:
        return super().counters_valid() and self.n_fitted <= self.n_seen

    def extra_state(self) -> dict[str, Any]:
        return {
            "tau": self.tau.tolist(),
            "tau_source": self.tau_source,
            "tau_scope": self.tau_scope,
            "exact_prefill": self.exact_prefill,
        }

    def load_extra_state(self, extra: Mapping[str, Any]) -> None:
        tau = np.asarray(extra["tau"], np.float32)
        if tau.shape != self.tau.shape or not are_factors(tau):
            raise ValueError(f"tau {extra['tau']}")
        self.tau[:] = tau
        self.tau_source, self.tau_scope = str(extra["tau_source"]), str(extra["tau_scope"])
        self.exact_prefill = bool(extra["exact_prefill"])

    def notes(self) -> list[str]:
        low, high = f"{self.tau.min():.3g}", f"{self.tau.max():.3g}"
        tau = low if low == high else f"{low} to {high}"
        lines = [f"{self.name}: tau {tau}{self.tau_scope} ({self.tau_source}), b = {self.config.sketch_bits}"]
        if self.exact_prefill:
            lines.append(
                f"{self.name}: this model was not adapted to binary attention; expect poor text "
                "(measured on llama-40m: perplexity about 4 times dense's)"
            )
        return lines


class SignKeys(H1B):
    """H1B-KV's sketched keys with values in f16: sketch_bits/8 + 2 * head_dim bytes per token and KV head.

    It is the baseline "Loki (1-bit Key)" of H1B-KV's Tables I and II, and equals ``h1b:keys_only=1``. The
    published Loki (arXiv 2406.02542) is something else: it ranks tokens by the leading principal components of
    the keys and attends to the top k, and quantizes nothing.
    """

    name = "sign_keys"
    paper = "H1B-KV's 1-bit-key baseline"
    summary = "1-bit Gaussian sketches of keys and queries, f16 values (the published Loki is PCA top-k)"
    tradeoff = "as h1b, untuned, perplexity about 4 times dense's; the values' bytes"
    Config = SketchConfig
