"""Sessions: generation, continuation, rewinding, limits, reports."""

import dataclasses
import gc
import json
import pathlib
import re
import threading
import weakref
from unittest import mock

import golden_cases
import numpy as np
import pytest
from helpers import SESSION_KV, n_cached, raises, text, text_of

from edgekv import LoadOptions, SamplingParams, Session, SessionError
from edgekv.engine import runner
from edgekv.engine.loading import Options
from edgekv.engine.report import RunReport
from edgekv.errors import CheckpointError, ConfigError, ContextError, MemoryBudgetError, TokenizerError


def leave_memory(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    monkeypatch.setattr("edgekv.engine.decoder.available_memory_bytes", lambda: n_bytes)


def test_an_option_that_is_none_is_refused(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Before a file is looked at."""
    for opened, *given in ((Session.load, model), (Session.restore, tmp_path / "none", model)):
        with raises(ConfigError, field="ctxt", match="ctxt=64: .*; accepted: kv, ctx, ") as caught:
            opened(*given, ctxt=64)
        assert caught.value.accepted[:2] == ("kv", "ctx")


@pytest.fixture(scope="module")
def loaded(model: pathlib.Path) -> Session:
    return Session.load(model)


@pytest.mark.parametrize("kv", SESSION_KV)
def test_a_second_generate_continues_the_first(loaded: Session, kv: str) -> None:
    """The cache holds what was fed and chosen, in just the bytes that were planned; a reset forgets all of it."""
    prompt, session = golden_cases.tokens("llama31")[:20], loaded.fork(kv=kv)
    sampling, runs = SamplingParams(temperature=1.0, seed=11), []
    for _ in range(2):
        first = text(session, prompt, 5, sampling=sampling)
        assert n_cached(session) == 24  # the fifth answer token is not in the cache yet
        second = text(session, [7, 8], 5, sampling=sampling)
        assert session.tokens == [*prompt, *first, 7, 8, *second]
        assert n_cached(session) == 31
        runs.append([*first, *second])
        arrays = [array for cache in session.caches for array in cache.arrays.values()]
        assert sum(array.nbytes for array in arrays) == session.report().cache_bytes == session.plan.cache_bytes
        session.reset()
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 3


def test_second_caches_are_asked_for(
    model: pathlib.Path, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    session = Session.load(model, weights="f32", ctx=40)
    other = session.fork()
    session.prefill([1, 2, 3])
    other.prefill([4, 5])
    other.save(tmp_path / "other")
    leave_memory(monkeypatch, session.nbytes - 1)
    for change in (lambda: session.copy_from(other), lambda: session.load_state(tmp_path / "other"), session.fork):
        with pytest.raises(MemoryBudgetError, match="kv cache"):
            change()
    assert session.tokens == [1, 2, 3]
    leave_memory(monkeypatch, session.nbytes)
    session.load_state(tmp_path / "other")
    assert session.tokens == [4, 5]


def test_a_copy_that_fails_keeps_the_conversation(model: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session.load(model, weights="f32", ctx=40)
    other, untouched = session.fork(), session.fork()
    for each in (session, untouched):
        each.prefill([1, 2, 3])
    other.prefill([4, 5, 6, 7])
    with monkeypatch.context() as patch:
        patch.setattr(runner, "copy_used", mock.Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            session.copy_from(other)
    assert (session.tokens, n_cached(session)) == ([1, 2, 3], 3)
    np.testing.assert_array_equal(session.prefill([8]), untouched.prefill([8]))


def test_report_counts(model: pathlib.Path) -> None:
    session = Session.load(model, ctx=60)
    steps = list(session.generate([1, 2, 3], max_new_tokens=6, temperature=0.0))
    report = session.report()
    assert (report.prefill_tokens, len(report.decode_latencies_s)) == (3, 5)
    assert report.decode_latencies_s == [step.latency_s for step in steps[1:]]
    assert report.time_to_first_token_s == steps[0].latency_s
    assert steps[-1].finish_message == "max_new_tokens"
    assert report.finish_reason == steps[-1].finish_reason == "length"
    assert (report.settings["ctx"], report.settings["seed"] is None) == (60, False)
    assert report.bytes_read_per_token > session.plan.weights_bytes / 2


def test_what_does_not_fit_is_refused(model: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, other = (Session.load(model, weights="f32", ctx=ctx) for ctx in (5, 6))
    for n, field, accepted in ((6, "ctx", "6 to 64"), (64, "ctx", "64 to 64"), (65, "prompt", "up to 64 tokens")):
        with raises(ContextError, field=field) as caught:
            session.generate([1] * n, temperature=0.0)
        assert caught.value.accepted == (accepted,)
    with raises(ContextError, field="ctx") as caught:
        Session.load(model, ctx=65)
    assert (caught.value.value, caught.value.accepted) == (65, ("1 to 64",))
    with raises(TokenizerError, field="tokenizer"):
        session.generate("text", temperature=0.0)
    other.prefill([1, 2, 3])
    with pytest.raises(SessionError, match="must be the same"):
        session.copy_from(other)
    assert not session.tokens
    leave_memory(monkeypatch, 100_000)
    with pytest.raises(MemoryBudgetError, match="kv cache"):
        Session.load(model)


def test_an_interrupted_step_leaves_all_layers_at_the_same_length(
    model: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session.load(model, kv="dense:dtype=f32")
    before = session.logits([1, 2, 3, 4])
    with monkeypatch.context() as patch:
        patch.setattr(session.caches[1], "attend", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            session.logits([5])
    assert [cache.n_seen for cache in session.caches] == [4, 4, 4]
    after = session.logits([5])
    session.reset()
    np.testing.assert_allclose(session.logits([1, 2, 3, 4, 5]), np.concatenate([before, after]), atol=2e-4)


@pytest.mark.parametrize("change", ["rewind", "reset"])
def test_interrupted_rewinds_are_mended(model: pathlib.Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers would have had several lengths, and the next text been another one."""
    session, other = (Session.load(model, kv="dense:dtype=f32", weights="f32") for _ in range(2))
    session.prefill([1, 2, 3, 4])
    with monkeypatch.context() as patch:
        patch.setattr(session.caches[1], "truncate", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            session.rewind(2) if change == "rewind" else session.reset()
    other.prefill(session.tokens)
    np.testing.assert_allclose(session.prefill([5, 6]), other.prefill([5, 6]), atol=2e-4)
    assert {cache.n_seen for cache in session.caches} == {6}


@pytest.mark.parametrize("slots", [1, 2])
def test_one_thread_computes_a_conversation(model: pathlib.Path, slots: int) -> None:
    """Another one is refused, as is a callback, and neither changes it; then it goes on."""
    session, refused = Session.load(model, weights="f32", slots=slots), []

    def use() -> None:
        for call, given in ((session.prefill, [9]), (session.generate, [9]), (session.rewind, 0)):
            with pytest.raises(SessionError) as caught:
                call(given)
            refused.append(caught.value)

    def progress(done: int, total: int) -> None:
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        use()

    session.prefill([1, 2, 3], progress=progress)
    assert len(refused) == 6 * session.config.n_layers
    assert session.tokens == [1, 2, 3]
    other = Session.load(model, weights="f32")
    other.prefill([1, 2, 3])
    np.testing.assert_array_equal(session.prefill([5]), other.prefill([5]))


def test_stop_string_and_text(stories: pathlib.Path) -> None:
    session = Session.load(stories, weights="f32")
    steps = list(session.generate("Once upon a time", max_new_tokens=100, stop=["park"], temperature=0.0))
    assert (steps[-1].finish_reason, steps[-1].finish_message) == ("stop", "stop string")
    assert re.match(r", there was(?!.*park)", text_of(steps), re.DOTALL)


def test_a_prompt_is_text_or_ids(stories: pathlib.Path) -> None:
    """Everywhere; the beginning-of-text token is put before the first text of a conversation alone."""
    session = Session.load(stories, weights="f32")
    begin, more = session.require_tokenizer().encode("Once upon"), session.encode("Once upon a time")
    logits = session.logits("Once upon")
    assert session.tokens == begin
    np.testing.assert_array_equal(session.fork().logits(begin), logits)
    np.testing.assert_array_equal(session.fork().prefill("Once upon"), logits[-1])
    assert session.align("Once upon a time") == more[len(begin) :]
    assert session.tokens == begin
    session.logits(" a")
    assert session.tokens == [*begin, *session.require_tokenizer().encode(" a", bos=False)]
    np.testing.assert_array_equal(session.embed("Once upon"), session.embed(begin))


def test_options_can_be_given_together_or_one_by_one(model: pathlib.Path) -> None:
    """The declaration for type checkers names the options that are checked."""
    assert list(LoadOptions.__annotations__) == [field.name for field in dataclasses.fields(Options)]
    options = LoadOptions(kv="kivi2", ctx=40)
    assert Session.load(model, **options).plan == Session.load(model, kv="kivi2", ctx=40).plan


def test_a_second_text_waits_for_the_first(model: pathlib.Path) -> None:
    session = Session.load(model)
    steps = session.generate([1, 2, 3], max_new_tokens=8, temperature=0.0)
    with pytest.raises(SessionError, match="exhaust or close its iterator"):
        session.generate([4], temperature=0.0)  # the first has not even begun
    next(steps)
    of_tokens = (session.generate, session.prefill, session.logits, session.align)
    for use, *given in (*((each, [4]) for each in of_tokens), (session.rewind, 1), (session.reset,)):
        with pytest.raises(SessionError, match="exhaust or close"):
            use(*given)
    assert len(list(steps)) == 7
    assert len(list(session.generate([4], max_new_tokens=2, temperature=0.0))) == 2


def test_what_ends_a_text_lets_the_next_begin(model: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session.load(model)
    closed = session.generate([1, 2], max_new_tokens=8, temperature=0.0)
    next(closed)
    closed.close()
    never_begun = session.generate([3], max_new_tokens=8, temperature=0.0)
    never_begun.close()
    dropped = session.generate([4], max_new_tokens=8, temperature=0.0)
    next(dropped)
    del dropped
    failing = session.generate([5], max_new_tokens=8, temperature=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(session.caches[0], "attend", None)
        with pytest.raises(TypeError):
            list(failing)
    assert len(list(session.generate([6], max_new_tokens=2, temperature=0.0))) == 2


def test_a_closed_session_frees_its_caches_and_refuses(model: pathlib.Path) -> None:
    with Session.load(model, kv="dense") as session:
        other = session.fork()
        steps = session.generate([1, 2, 3], max_new_tokens=8, temperature=0.0)
        next(steps)
        cache = weakref.ref(session.caches[0])
    gc.collect()
    assert cache() is None
    assert list(steps) == []
    uses = [(use,) for use in (lambda: session.tokens, session.report, session.reset, session.fork)]
    for use, *given in (*uses, (session.generate, [1]), (session.embed, [1]), (session.save, "never-written")):
        with pytest.raises(SessionError, match="is closed"):
            use(*given)
    session.close()
    assert len(list(other.generate([1, 2, 3], max_new_tokens=2, temperature=0.0))) == 2


def test_a_shipped_model_by_its_name(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Session.load("demo", ctx=64) as session:
        assert session.model.path.name == "demo"
        assert any(step.text for step in session.generate("Once", max_new_tokens=4, temperature=0.0))
    with raises(CheckpointError, field="model"):
        Session.load("dem")
    (tmp_path / "demo").mkdir()
    with pytest.raises(CheckpointError, match="holds no"):  # a path comes first
        Session.load("demo")


# Reports

SETTINGS = {"kv": "h1b", "weights": "int8", "ctx": 8192, "tau": None}
SHOWN = {"settings": SETTINGS, "model": {"name": "small", "n_parameters": 40_100_000}, "machine": {}}


def test_derived_numbers() -> None:
    latencies_s = [0.020, 0.030, 0.020, 0.020, 0.110]  # of which p95 is 80% of the way from the 4th to the 5th
    report = RunReport(**SHOWN, prefill_tokens=8000, prefill_s=16.0, decode_latencies_s=latencies_s)
    report.bytes_read_per_token = 60_000_000
    numbers = report.derived().as_dict()
    expected = {"prefill_tokens_per_s": 500, "decode_tokens": 5, "decode_tokens_per_s": 25}
    expected |= {"latency_median_ms": 20, "latency_p95_ms": 94, "achieved_gb_per_s": 3}
    assert {name: numbers[name] for name in expected} == pytest.approx(expected)


def test_what_was_not_measured_is_none() -> None:
    report = RunReport(**SHOWN)
    measured = {"settings", "model", "machine", "notes", "compile_s", "prefill_tokens", "decode_tokens"}
    numbers = report.as_dict()
    assert {name for name, value in numbers.items() if value is not None} == measured | {"decode_latencies_s"}
    assert not re.search("None|nan", report.to_text())


def test_settings_of_any_type_fit_json() -> None:
    given = {
        "model": pathlib.Path("a/b"),
        "threshold": np.float32("inf"),
        "stop": ("x", "\udcff"),
        "scheme": {"bits": np.arange(2)[1], "exact": np.bool_(True)},
    }
    expected = {"model": "a/b", "threshold": None, "stop": ["x", "\udcff"], "scheme": {"bits": 1, "exact": True}}
    found = RunReport(settings=given, model={}, machine={}).as_dict()["settings"]
    assert json.loads(json.dumps(found)) == expected
