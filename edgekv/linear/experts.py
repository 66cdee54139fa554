"""Experts: which of a layer's each token goes through, and the products with those alone.

A pair is a token and one of its experts. Pairs are ordered by expert, so that one that several tokens have chosen
is read once for all of them. This is the meaning, in NumPy; `stored_experts` has kernels for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from edgekv.linear.activations import ACTIVATIONS, clamped_gate
from edgekv.linear.low_rank import Product
from edgekv.models.config import ExpertsConfig, ModelConfig
from edgekv.types import F32, I64

ExpertProduct = Callable[[F32, I64, str], F32]
"""(rows (m, columns), their experts (m,) in ascending order, a linear's name) -> (m, rows of one expert)."""

Gate = Callable[[F32], F32]
"""(m, 2 * channels), gates and what they let through -> (m, channels)."""


def graph_width(config: ModelConfig, i: int) -> int:
    """Channels that the graph of `attention_out` gives: with experts also their input and the router's logits."""
    experts = config.experts_of(i)
    return 2 * config.hidden_size + experts.count if experts else config.hidden_size


def choose(logits: F32, experts: ExpertsConfig) -> tuple[I64, F32]:
    """Of logits (n, experts): each token's experts (n, k), the largest first, and their weights (n, k).

    Of equal logits the first are chosen, and NaN only where there are too few numbers.
    """
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, : experts.per_token]
    largest = np.take_along_axis(logits, chosen[:, :1], axis=1)
    weights: F32 = np.exp(np.take_along_axis(logits, chosen, axis=1) - largest)
    of_all = weights if experts.renormalized else np.exp(logits - largest)
    weights /= of_all.sum(axis=1, keepdims=True)
    return chosen, weights


def add_experts(
    experts: ExpertsConfig, i: int, x: F32, y: F32, logits: F32, product: ExpertProduct, gate: Gate
) -> F32:
    """x (n, hidden) plus what layer i's experts make of y (n, hidden), weighted by the router's logits."""
    chosen, weights = choose(logits, experts)
    order = np.argsort(chosen, axis=None, kind="stable")
    of = chosen.reshape(-1)[order]
    inner = gate(product(y[order // experts.per_token], of, f"{i}.experts_up"))
    results = product(inner, of, f"{i}.experts_down")
    by_token = np.empty_like(results)
    by_token[order] = results
    added = np.matmul(weights[:, None], by_token.reshape(len(x), experts.per_token, -1))[:, 0]
    summed: F32 = np.add(x, added, dtype=np.float32)
    return summed


def gated(config: ModelConfig, both: F32) -> F32:
    """A `Gate` in NumPy."""
    gate, up = np.split(both, 2, axis=1)
    if config.experts and config.experts.clamped:
        return clamped_gate(gate, up, *config.experts.clamped)
    return ACTIVATIONS[config.activation](gate) * up


def groups(of: I64) -> Iterator[tuple[int, slice]]:
    """Each expert of the pairs, and the pairs that have it."""
    borders = [0, *(np.flatnonzero(np.diff(of)) + 1).tolist(), len(of)]
    for a, b in itertools.pairwise(borders):
        yield int(of[a]), slice(a, b)


def expert_rows(rows: F32, of: I64, matrices: F32, bias: F32 | None, n_experts: int, multiply: Product) -> F32:
    """An `ExpertProduct` in float32: matrices (n_experts * outputs, columns), one below the other, and biases."""
    n = len(matrices) // n_experts
    result = np.empty((len(rows), n), np.float32)
    for expert, pairs in groups(of):
        own = slice(expert * n, (expert + 1) * n)
        result[pairs] = multiply(rows[pairs], matrices[own])
        if bias is not None:
            result[pairs] += bias[own]
    return result
