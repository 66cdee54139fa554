"""The choice of the next token where the logits lie; the choice is all that comes back to the host."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from edgekv.errors import EdgeKVError
from edgekv.kernels.memory import to_host
from edgekv.session.sampling_params import SamplingParams


def choose(logits: Any, params: SamplingParams, random: float) -> int:
    """`edgekv.session.sampling.Sampler.sample` for adjusted logits (vocab,) on a device, ``random`` its draw.

    The same filters in the same order, sums in another order: a draw that falls within 1e-15 of the border between
    two tokens may choose the other one.
    """
    largest = np.max(logits)
    chosen = np.argmax(logits) if params.temperature == 0 else _drawn(logits, largest, params, random)
    answer = to_host(np.stack([chosen.astype(np.float64), largest.astype(np.float64)]))
    if not math.isfinite(answer[1]):
        raise EdgeKVError(
            f"the largest logit is {answer[1]}: the weights are damaged or a computation overflowed; "
            "check the model file"
        )
    return int(answer[0])


def _drawn(logits: Any, largest: Any, params: SamplingParams, random: float) -> Any:
    """The id, still on the device, that `random` falls on."""
    n = logits.size
    scaled = (logits.astype(np.float64) - largest) / params.temperature
    order = np.argsort(-scaled, kind="stable")  # of equals the lower id first
    weights = np.exp(scaled[order])
    if params.top_k is not None and params.top_k < n:
        weights[params.top_k :] = 0
    if params.top_p < 1:
        sums = np.cumsum(weights)
        weights[1:] *= sums[:-1] < params.top_p * sums[-1]
    if params.min_p > 0:
        weights *= weights >= params.min_p
    if params.top_p == 1:  # the series then runs over ids, not from the likeliest on
        by_id = np.empty_like(weights)
        by_id[order] = weights
        return _pick(by_id, random)
    return order[_pick(weights, random)]


def _pick(weights: Any, random: float) -> Any:
    """The first index at which the sum of the weights exceeds random times their total, or the last."""
    sums = np.cumsum(weights)
    return np.minimum(np.sum(sums <= random * sums[-1]), sums.size - 1)
