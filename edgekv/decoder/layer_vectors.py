"""What layers have beside linear weights: norms of heads, sinks, and the arrays of layers that do not attend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from edgekv.linear.weights import Weights
from edgekv.types import F32

NONE = np.empty(0, np.float32)

Upload = Callable[[F32], Any]
"""Brings an array of the host to where the kernels compute."""


def head_norms(weights: Weights, upload: Upload) -> list[tuple[Any, Any]]:
    """For each layer the norms of queries and keys, (head_dim,) each; empty where it has none."""
    c = weights.arch.config
    normed = c.attending if c.qk_norm else ()
    none = upload(NONE), upload(NONE)
    return [
        (_vector(weights, f"{i}.norm_q", upload), _vector(weights, f"{i}.norm_k", upload)) if i in normed else none
        for i in range(c.n_layers)
    ]


def sinks(weights: Weights, upload: Upload) -> list[Any]:
    """For each layer the score of each head that belongs to no token, (n_heads,); None: the model has none."""
    c = weights.arch.config
    return [_vector(weights, f"{i}.sinks", upload) if c.attention_sinks else None for i in range(c.n_layers)]


def recurrence_arrays(weights: Weights, upload: Upload) -> list[dict[str, Any]]:
    """What the kernels of layers that do not attend are given, by argument; of convolutions (taps, channels)."""
    return [
        {
            name.partition(".")[2]: upload(_by_tap(weights.array(name)).copy())
            for name in weights.arch.layer_arrays(i)
        }
        for i in range(weights.arch.config.n_layers)
    ]


def _vector(weights: Weights, name: str, upload: Upload) -> Any:
    """A copy: mapped vectors are read-only, to Numba another type, for which a kernel is compiled again."""
    return upload(weights.vector(name).copy())


def _by_tap(array: F32) -> F32:
    """Of a convolution's weights (channels, 1, taps) the transposed; others as they are."""
    return array[:, 0].T if array.ndim == 3 else array
