"""What is done to logits before any filter: penalties for tokens that were there, and biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edgekv.session.sampling_params import SamplingParams


def adjusted(logits: Any, params: SamplingParams, history: Sequence[int], chosen: Mapping[int, int]) -> Any:
    """logits (vocab,) with the repetition penalty, the other two, and the biases; the argument stays as it is.

    history: ids of prompt and output. chosen: how often each token was sampled. Logits of a device stay there.
    """
    repeats, counts = params.repetition_penalty != 1 and len(history) > 0, params.counts and bool(chosen)
    if not (repeats or counts or params.logit_bias):
        return logits
    logits = logits.copy()
    if repeats:
        latest = history if params.repetition_window is None else history[-params.repetition_window :]
        seen = _on_device(np.unique(np.asarray(latest, np.int64)), logits)
        values, penalty = logits[seen], np.float32(params.repetition_penalty)
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if counts:
        n = np.fromiter(chosen.values(), np.float32, len(chosen))
        _add(logits, list(chosen), -(params.frequency_penalty * n + params.presence_penalty))
    if params.logit_bias:
        _add(logits, list(params.logit_bias), list(params.logit_bias.values()))
    return logits


def _add(logits: Any, ids: Sequence[int], values: Any) -> None:
    places = _on_device(np.asarray(ids, np.int64), logits)
    logits[places] = logits[places] + _on_device(np.asarray(values, np.float32), logits)


def _on_device(array: Any, logits: Any) -> Any:
    return np.asarray(array, like=logits)
