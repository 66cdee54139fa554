"""Routing by kernels: which experts a token goes through, their weights, and the sum, against NumPy."""

from __future__ import annotations

import pathlib

import golden_cases
import numpy as np
import pytest

from edgekv.engine.model import Model
from edgekv.kernels import threads
from edgekv.kernels.cpu import launch, layers
from edgekv.models.config import ExpertsConfig
from edgekv.types import Threads
from edgekv.weights.cpu import CpuOps
from edgekv.weights.ops import NumpyOps, choose


def check(logits: np.ndarray, k: int, renormalized: bool) -> tuple[list[list[int]], np.ndarray]:
    """Each token's experts in ascending order, and the weights of all pairs: both are NumPy's."""
    chosen, weights = choose(logits, ExpertsConfig((True,), logits.shape[1], k, 1, renormalized))
    order = np.argsort(chosen, axis=None, kind="stable")
    experts, tokens, own_weights = layers.route(logits, k, renormalized)
    np.testing.assert_array_equal(experts, chosen.reshape(-1)[order])
    np.testing.assert_array_equal(tokens, order // k)
    np.testing.assert_allclose(own_weights, weights.reshape(-1)[order], rtol=1e-6)
    return [experts[tokens == token].tolist() for token in range(len(logits))], own_weights


@pytest.mark.parametrize("renormalized", [False, True])
@pytest.mark.parametrize(
    ("n", "count", "k"), [(1, 8, 2), (1, 128, 8), (5, 32, 4), (300, 24, 8), (3, 4, 4), (2, 1, 1)]
)
def test_the_chosen_and_their_weights(n: int, count: int, k: int, renormalized: bool) -> None:
    logits = 3 * np.random.default_rng(count).standard_normal((n, count)).astype(np.float32)
    check(logits, k, renormalized)
    check(np.rint(logits), k, renormalized)  # many are equal


@pytest.mark.parametrize("renormalized", [False, True])
def test_equal_logits_and_such_that_are_no_numbers(renormalized: bool) -> None:
    nan, inf = np.nan, np.inf
    assert check(np.array([[1, 2, 2, 1, 2]], np.float32), 2, renormalized)[0] == [[1, 2]]
    early_and_late = np.array([[nan, 5, 4], [5, 4, nan], [4, nan, 5], [nan, -inf, nan]], np.float32)
    with np.errstate(invalid="ignore"):  # -inf less -inf
        assert check(early_and_late, 1, renormalized)[0] == [[1], [0], [2], [1]]
        assert check(early_and_late, 2, renormalized)[0] == [[1, 2], [0, 1], [0, 2], [0, 1]]
        chosen, weights = check(np.array([[nan] * 5, [inf, 0, nan, 3, 1]], np.float32), 2, renormalized)
    assert chosen == [[0, 1], [0, 3]]
    assert np.isnan(weights).all()


@pytest.mark.parametrize("channels", [1, 70, 257])
def test_results_are_added_on_any_threads(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(channels)
    _, tokens, weights = layers.route(rng.standard_normal((7, 12)).astype(np.float32), 3, False)
    results = rng.standard_normal((21, channels)).astype(np.float32)
    x = rng.standard_normal((7, 2 * channels)).astype(np.float32)[:, channels:]
    meant = x.copy()
    for token, weight, result in zip(tokens, weights, results, strict=True):
        meant[token] += weight * result
    for n_threads in (1, 2, 3):
        monkeypatch.setattr(threads, "count", lambda n_threads=n_threads: n_threads)
        monkeypatch.setattr(launch, "MIN_PARALLEL_WORK", 0)
        np.testing.assert_array_equal(layers.add_results(x, results, tokens, weights), meant)


@pytest.fixture(params=["mixtral", "qwen3-moe", "gpt-oss"])
def model(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Model:
    return Model.open(golden_cases.write_checkpoint(request.param, tmp_path / "model"))


def drawn(model: Model) -> list[np.ndarray]:
    """For six tokens the residual stream, and what experts get."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((6, model.config.hidden_size)).astype(np.float32) for _ in range(2)]


def test_a_layer_of_experts(model: Model) -> None:
    store, (x, y) = model.store(model.weight_format("f32")), drawn(model)
    meant, out = (ops.add_experts(x, y, 1) for ops in (NumpyOps(store), CpuOps(store, Threads(1, 1))))
    error = np.linalg.norm(out - meant) / np.linalg.norm(meant - x)
    assert error < 1e-6, error  # measured: 2e-7


def test_a_token_has_the_same_bits_alone_as_with_others(model: Model) -> None:
    ops, inputs = CpuOps(model.store(model.weight_format("int4")), Threads(1, 1)), drawn(model)
    alone = [ops.add_experts(*(rows[i : i + 1] for rows in inputs), 1) for i in range(6)]
    np.testing.assert_array_equal(np.concatenate(alone), ops.add_experts(*inputs, 1))
