"""Threads of the weight products are measured once, remembered and overridden; no number changes a sum."""

import json
import pathlib
from typing import Any

import numba
import numpy as np
import pytest

from edgekv.checkpoint.hub import load_shape
from edgekv.files import cache_root
from edgekv.machine import machine_info
from edgekv.types import Threads
from edgekv.weights import cpu as threads
from edgekv.weights.cpu import CpuOps
from edgekv.weights.formats import ModelFormat
from edgekv.weights.random_weights import random_store
from edgekv.weights.store import WeightStore


@pytest.fixture
def store() -> WeightStore:
    return random_store(load_shape("tiny", 2), ModelFormat("q4"))


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setenv("NUMBA_NUM_THREADS", str(numba.config.NUMBA_NUM_THREADS))  # which a compilation reads anew
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(
    ("decode", "prompt", "chosen"),
    [
        ({4: 1.0, 3: 0.9, 2: 1.0, 1: 1.8}, {4: 1.0, 3: 1.3, 2: 2.0, 1: 4.0}, (3, 4)),  # one core less is faster
        ({4: 1.0, 3: 1.01, 2: 1.02, 1: 1.8}, {4: 1.0, 3: 1.3, 2: 2.0, 1: 4.0}, (2, 4)),  # memory is full with two
        ({8: 1.0, 6: 1.3, 4: 1.9, 2: 3.8}, {8: 2.0, 6: 1.3, 4: 1.0, 2: 4.0}, (8, 8)),  # never fewer in a prompt
        ({8: 3.0, 6: 2.0, 4: 1.0, 2: 1.01}, {8: 2.0, 6: 1.3, 4: 1.0, 2: 4.0}, (2, 4)),  # four cores are slow ones
    ],
)
def test_the_fewest_threads_that_are_nearly_as_fast(
    store: WeightStore, monkeypatch: Any, decode: Any, prompt: Any, chosen: tuple[int, int]
) -> None:
    monkeypatch.setattr(threads, "measure", lambda *_: (decode, prompt))
    assert threads.product_threads(store, None) == chosen


@pytest.mark.usefixtures("four_cores")
def test_a_measurement_is_made_once(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    found = threads.product_threads(store, None)
    assert 1 <= found.decode <= found.prompt <= 4
    (key,) = json.loads((cache_root() / "threads.json").read_text())["content"]
    assert f" cores, edgekv {machine_info()['versions']['edgekv']}: " in key
    monkeypatch.setattr(threads, "measure", None)
    assert threads.product_threads(store, None) == found
    assert threads.product_threads(store, 3) == (3, 3)
    for linear in store.arch.layer_linears(0):
        others = {name: "q3" if name == linear else "q4" for name in store.arch.linears()}
        assert threads._key(store.arch, ModelFormat(store.form.name, tuple(others.items()))) != key
    assert threads._key(store.arch, ModelFormat("gguf", tuple(dict.fromkeys(others, "q4").items()))) == key


@pytest.mark.parametrize("weights", ["q4", "int8-32", "f32"])
def test_products_are_the_same_with_any_number_of_threads(weights: str) -> None:
    """One row is tried, and prompts whose rows are shared by several callers."""
    store = random_store(load_shape("tiny", 2), ModelFormat(weights))
    arch, c, rng = store.arch, store.arch.config, np.random.default_rng(0)
    plain = CpuOps(store, Threads(1, 1))
    for n_threads in (Threads(2, 2), Threads(1, 4), Threads(2, 3)):
        ops = CpuOps(store, n_threads)
        assert ops.threads == n_threads
        for n in (1, 65):
            x = rng.standard_normal((n, c.hidden_size), np.float32)
            attention = rng.standard_normal((n, c.q_size), np.float32)
            found, meant = (
                (arch.pre_attention(each, 1, x), arch.post_attention(each, 1, x, attention), arch.head(each, x))
                for each in (ops, plain)
            )
            assert all(map(np.array_equal, found, meant))
