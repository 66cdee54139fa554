"""Layers that carry a state in place of keys and values: kernels, snapshots, and what a session does with them."""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import golden_cases
import numpy as np
import pytest
from helpers import n_cached, raises, text

from edgekv import ConfigError, Session, SessionError
from edgekv.engine.runner import ANSWER_TOKENS
from edgekv.engine.session_file import SessionFile, write
from edgekv.kernels import numba_kernels, numpy_kernels
from edgekv.kvcache.cache import Workspace, rewind
from edgekv.kvcache.recurrent import SNAPSHOT_TOKENS, RecurrentState
from edgekv.models import architecture
from edgekv.models.config import GatedDelta, Recurrence, ShortConv

CTX = 2048
CASES = ("lfm2", "qwen3_5")
DELTAS = [GatedDelta(2, 4, 16, 40, 4, 1e-6), GatedDelta(3, 3, 20, 64, 3, 1e-5), GatedDelta(1, 2, 8, 7, 2, 1e-6)]
CONVS = [ShortConv(200, 3, False), ShortConv(130, 5, True), ShortConv(7, 2, True)]


def weights_of(recurrence: Recurrence, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    if isinstance(recurrence, ShortConv):
        bias = {"bias": draw(recurrence.channels)} if recurrence.bias else {}
        return {"weight": draw(recurrence.taps, recurrence.channels), **bias}
    heads = recurrence.value_heads
    return {
        "conv": draw(recurrence.taps, recurrence.convolved),
        "log_decay": draw(heads),
        "time_bias": draw(heads),
        "norm": draw(recurrence.value_dim),
    }


def tokens_of(recurrence: Recurrence, n: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, recurrence.projected)).astype(np.float32)


def state_of(recurrence: Recurrence, slots: int = 4, capacity: int = 5000, kernels: Any = None) -> RecurrentState:
    state = RecurrentState(recurrence, capacity, slots)
    state.allocate(kernels or numpy_kernels(), Workspace())
    return state


def run(state: RecurrentState, x: np.ndarray, pieces: Sequence[int]) -> np.ndarray:
    weights, ends = weights_of(state.recurrence), np.cumsum([0, *pieces])
    return np.concatenate([state.run(x[a:b], weights).copy() for a, b in itertools.pairwise(ends)])


@pytest.mark.parametrize("recurrence", CONVS + DELTAS, ids=str)
def test_compiled_kernels_equal_the_reference(recurrence: Recurrence) -> None:
    """Over odd sizes, a prompt, single tokens and a few; and so are the states that they leave."""
    x, pieces = tokens_of(recurrence, 87), [70, 1, 1, 5, 10]
    states = [state_of(recurrence, kernels=each) for each in (numpy_kernels(), numba_kernels(2))]
    expected, found = (run(state, x, pieces) for state in states)
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=2e-5)
    for name in recurrence.state():
        np.testing.assert_allclose(states[1].arrays[name], states[0].arrays[name], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("recurrence", [CONVS[1], DELTAS[0]], ids=str)
def test_a_rewind_goes_to_the_latest_snapshot(recurrence: Recurrence) -> None:
    x = tokens_of(recurrence, 700)
    state = state_of(recurrence, kernels=numba_kernels(1))
    state.checkpoint_at(600)
    whole = run(state, x, [300, 400])
    assert sorted(state.snapshots) == [0, SNAPSHOT_TOKENS, 2 * SNAPSHOT_TOKENS, 600]
    for target, at in ((650, 600), (600, 600), (599, 2 * SNAPSHOT_TOKENS), (300, SNAPSHOT_TOKENS), (255, 0)):
        again = state_of(recurrence, kernels=numba_kernels(1))
        again.checkpoint_at(600)
        run(again, x, [300, 400])
        assert rewind([again], target) == again.n_seen == at
        assert max(again.snapshots) <= at
        replayed = run(again, x[at:], [700 - at])  # sums' order can depend on how many tokens there are at once
        np.testing.assert_allclose(replayed, whole[at:], rtol=0, atol=1e-6 * np.abs(whole).max())


def test_an_interrupted_run_leaves_no_half_made_state(monkeypatch: pytest.MonkeyPatch) -> None:
    recurrence = CONVS[0]
    x, kernels = tokens_of(recurrence, 400), numpy_kernels()
    state = state_of(recurrence)
    whole, state = run(state, x, [400]), state_of(recurrence)
    run(state, x, [300])

    def torn(x: np.ndarray, out: np.ndarray, **arrays: np.ndarray) -> None:
        arrays["window"][:] = np.nan
        raise KeyboardInterrupt

    state.kernels = SimpleNamespace(short_conv=torn)
    with pytest.raises(KeyboardInterrupt):
        run(state, x[300:], [1])
    state.kernels = kernels
    assert rewind([state], 300) == SNAPSHOT_TOKENS
    n = SNAPSHOT_TOKENS
    np.testing.assert_array_equal(run(state, x[n:], [400 - n]), whole[n:])


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp(request.param)
    return golden_cases.write_checkpoint(request.param, folder, max_position_embeddings=CTX)


@pytest.fixture(scope="module")
def loaded(model: pathlib.Path) -> Session:
    return Session.load(model, ctx=CTX, kv="dense:dtype=f32", weights="f32")


def numbers(n: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, golden_cases.VOCAB, n)]


def test_a_conversation_sent_again_computes_few_tokens_again(loaded: Session) -> None:
    """The second turn begins with the first prompt, but for its last tokens, as templates have it."""
    session, fresh = loaded.fork(), loaded.fork()
    first = numbers(700, 1)
    answer, cut = text(session, first), len(first) - 3
    second = [*first[:cut], *answer[2:], *numbers(30, 2)]
    rest = session.align(second)
    assert rest == second[cut:]
    found = text(session, rest)
    assert session.report().prefill_tokens == len(second) - (len(first) - ANSWER_TOKENS)
    assert found == text(fresh, second)
    assert fresh.report().prefill_tokens == len(second)
    third = [*second, *found, *numbers(20, 3)]  # all that was said, and more: nothing is computed twice
    rest = session.align(third)
    assert len(rest) == 20
    text(session, rest)
    assert session.report().prefill_tokens == 21  # with the last answer's final token


def test_a_restored_conversation_goes_on_and_back(loaded: Session, tmp_path: pathlib.Path) -> None:
    session = loaded.fork()
    text(session, numbers(600, 1))
    session.save(tmp_path / "session")
    restored = Session.restore(tmp_path / "session", loaded)
    for each in (session, restored):
        each.rewind(590)
    assert n_cached(restored) == n_cached(session) == 600 - ANSWER_TOKENS
    assert text(restored, numbers(9, 2)) == text(session, numbers(9, 2))
    copied = loaded.fork()
    copied.copy_from(session)
    for each in (session, copied):
        each.rewind(500)
    assert n_cached(copied) == n_cached(session) == SNAPSHOT_TOKENS
    assert text(copied, numbers(9, 3)) == text(session, numbers(9, 3))


def test_damaged_states_are_refused(loaded: Session, tmp_path: pathlib.Path) -> None:
    """Each number of a file is checked before anything is computed with it."""
    session = loaded.fork()
    text(session, numbers(300, 1))
    session.save(tmp_path / "session")
    file = SessionFile(tmp_path / "session")
    i = next(i for i, layer in enumerate(session.caches) if isinstance(layer, RecurrentState))
    state = session.caches[i].state()
    arrays = {f"{k}/{name}": a for k, c in enumerate(session.caches) for name, a in c.state().arrays.items()}
    slots = len(state.extra["snapshots"])

    def refuses(change: dict[str, Any], arrays: dict[str, np.ndarray] = arrays) -> None:
        content = json.loads(json.dumps(file.content))
        for part, value in change.items():
            content["layers"][i][part] = value
        write(tmp_path / "bad", content, arrays)
        with pytest.raises(SessionError):
            Session.restore(tmp_path / "bad", loaded)

    for wrong in ([0] * (slots - 1), [9999] + [0] * (slots - 1), [5, 5] + [0] * (slots - 2), 3):
        refuses({"fitted": {"version": 1, "snapshots": wrong}})
    for each in ({"version": 2, "snapshots": [0] * slots}, {}, None):
        refuses({"fitted": each})
    refuses({"counters": {"n_seen": 311, "n_lost": 0}})
    for name in (f"{i}/window", f"{i}/snapshots.window"):
        bad = arrays[name].copy()
        bad.reshape(-1)[0] = np.nan
        for each in (bad, arrays[name].astype(np.float64), np.repeat(arrays[name], 2, axis=-1)):
            refuses({}, arrays | {name: each})


def test_what_has_no_way_with_such_layers(model: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, raises(ConfigError, field="draft", match="carry a state"):
        patch.setattr("edgekv.engine.loading.require_memory", None)  # refused before the weights are read
        Session.load(model, ctx=64, draft="ngram")
    with raises(ConfigError, field="draft", match="unknown"):
        Session.load("no such model", draft="guess")
    Session.load(model, ctx=64, draft="auto")
    with raises(ConfigError, field="device", match="do not attend"):
        from edgekv.engine.cuda import require_layers

        require_layers(architecture(json.loads((model / "config.json").read_text())).config)
