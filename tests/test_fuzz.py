"""A minute of `python -m tests.fuzz` with fixed seeds, and all that it once found."""

import pathlib

import pytest
from fuzz.runner import Tally, run

CORPUS = pathlib.Path(__file__).parent / "fuzz" / "corpus.txt"
SEEDS = 2000  # far more than fit in a minute
PENDING: set[str] = set()


def told(tally: Tally) -> str:
    return "\n\n".join(f"{kind}:{seed}\n{reason}" for (kind, seed), reason in tally.failures)


def test_what_once_failed() -> None:
    lines = [line for line in CORPUS.read_text().splitlines() if line and not line.startswith("#")]
    cases = [(kind, int(seed)) for kind, _, seed in (line.partition(":") for line in lines)]
    tally = run(cases)
    assert not tally.failures, told(tally)
    assert tally.n_cases == len(lines)


def test_a_minute_of_damage() -> None:
    """Success or an EdgeKVError, whatever the input: no crash, no hang, no more than 2 GiB."""
    from fuzz.kinds import KINDS

    kinds = [kind for kind in KINDS if kind not in PENDING]
    tally = run(((kind, seed) for seed in range(SEEDS) for kind in kinds), seconds=55)
    assert not tally.failures, told(tally)
    assert {kind for kind, _ in tally.counts} == set(kinds)


def test_crashes_hangs_and_hunger_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness itself, with cases that do what none should."""
    from fuzz import runner

    monkeypatch.setattr(runner, "SECONDS", 2.0)
    monkeypatch.setenv("EDGEKV_FUZZ_SELF_TEST", "1")
    tally = run([("crash", 0), ("hang", 0), ("hunger", 0), ("request", 0)])
    reasons = [reason for _, reason in tally.failures]
    assert reasons[0].startswith("crash")
    assert reasons[1].startswith("hang")
    assert "MemoryError" in reasons[2]
    assert len(reasons) == 3
