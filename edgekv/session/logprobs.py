"""Log probabilities of tokens: the model's own, before temperature, penalties and filters."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from edgekv.kernels.memory import to_host


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Of one token: natural logarithms; ``top`` has the likeliest tokens at its place, the likeliest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprob(logits: Any, token: int, n_top: int) -> TokenLogprob:
    """Of ``token`` among logits (vocab,), which may lie on a device, and of the ``n_top`` likeliest."""
    x = logits.astype(np.float64)
    x -= np.max(x)
    x -= np.log(np.sum(np.exp(x)))
    ids = _largest(x, n_top)
    places, values = to_host(ids), to_host(x[np.concatenate([np.asarray([token], like=ids), ids])])
    top = zip(map(int, places), map(float, values[1:]), strict=True)
    return TokenLogprob(token, float(values[0]), tuple(top))


def _largest(x: Any, n: int) -> Any:
    """Indices of the n largest, the largest first, of equals the lower one first; without a sort of them all."""
    if n == 0:
        return np.asarray([], np.int64, like=x)
    ids = np.sort(np.argpartition(-x, n - 1)[:n]) if n < x.size else np.arange(x.size, like=x)
    return ids[np.argsort(-x[ids], kind="stable")]
