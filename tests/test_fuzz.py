"""Some seconds of `python -m tests.fuzz` with fixed seeds, and all that it once found."""

import os
import pathlib
from collections.abc import Iterator

import pytest
from fuzz import runner
from fuzz.__main__ import cases
from fuzz.mutate import KINDS, RARE
from fuzz.runner import Tally, Worker, run
from helpers import needs_papers

CORPUS = pathlib.Path(__file__).parent / "fuzz" / "corpus.txt"
WHOLE = "EDGEKV_FUZZ_SECONDS" in os.environ  # set by .ci/run: so long, and the kinds that are slow too
SECONDS = float(os.environ.get("EDGEKV_FUZZ_SECONDS", "3"))


def failures_of(tally: Tally) -> str:
    return "\n\n".join(f"{kind}:{seed}\n{reason}" for (kind, seed), reason in tally.failures)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """A worker for all tests, since its material takes longer than most cases."""
    worker = Worker()
    yield worker
    worker.close()


@needs_papers
def test_what_once_failed(worker: Worker) -> None:
    lines = [line for line in CORPUS.read_text().splitlines() if line and not line.startswith("#")]
    cases = [(kind, int(seed)) for kind, _, seed in (line.partition(":") for line in lines)]
    tally = run(cases, worker=worker)
    assert not tally.failures, failures_of(tally)
    assert tally.n_cases == len(lines)


@needs_papers
def test_some_seconds_of_damage(worker: Worker) -> None:
    """Success or an EdgeKVError, whatever the input: no crash, no hang, no more than 2 GiB."""
    kinds = [kind for kind in KINDS if WHOLE or kind not in RARE]
    for tally in (run([(kind, 0) for kind in kinds], worker=worker), run(cases(1, kinds), SECONDS, worker=worker)):
        assert not tally.failures, failures_of(tally)
        assert tally.n_cases


def test_crashes_hangs_and_hunger_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness itself, with cases that do what none should."""
    monkeypatch.setattr(runner, "SECONDS", 2.0)
    monkeypatch.setenv(runner.SELF_TEST, "1")
    tally = run([("crash", 0), ("hang", 0), ("hunger", 0), ("nothing", 0)])
    reasons = [reason for _, reason in tally.failures]
    assert reasons[0].startswith("crash")
    assert reasons[1].startswith("hang")
    assert "MemoryError" in reasons[2]
    assert len(reasons) == 3
