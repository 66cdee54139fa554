"""The retrieval tasks of the tables: prompts with facts at given depths, and their score by depth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from edgekv.quality.needles import COLOURS, Fact, Prose, Rng, draw_value

DEPTHS = tuple((i + 0.5) / 10 for i in range(10))


def pass_key(rng: Rng) -> list[Fact]:
    """One 5-digit pass key."""
    return [Fact(draw_value(rng))]


def four_codes(rng: Rng) -> list[Fact]:
    """The 5-digit codes of four doors in random order; the first is the one to ask for."""
    return [Fact(draw_value(rng), f"{colour} door") for colour in rng.permutation(COLOURS[:4])]


TASKS: dict[str, Callable[[Rng], list[Fact]]] = {"pass-key": pass_key, "four-codes": four_codes}


@dataclasses.dataclass(frozen=True)
class NeedlePrompt:
    """A test: ids that end in a question, and the ids of the digits that answer it."""

    ids: list[int]
    answer: list[int]
    depth: float


def make_prompt(rng: Rng, prose: Prose, task: str, length: int, depth: float) -> NeedlePrompt:
    """Prompt and answer take ``length`` tokens together; the fact asked for is at ``depth`` (0 to 1).

    Other facts, which must not be confused with it, are anywhere.
    """
    facts = TASKS[task](rng)
    pieces: list[tuple[float, list[int]]] = []
    for i, fact in enumerate(facts):
        pieces.append((depth if i == 0 else rng.random(), prose.continuing(" " + fact.statement)))
    answer = prose.continuing(" " + facts[0].value)
    pieces.append((1.0, prose.continuing("\n\n" + facts[0].question) + answer))
    ids = prose.weave(rng, pieces, length)[0].tolist()
    return NeedlePrompt(ids[: -len(answer)], answer, depth)


def make_prompts(prose: Prose, task: str, length: int, n: int = 100, seed: int = 0) -> list[NeedlePrompt]:
    """``n`` fresh prompts, spread evenly over the ten depths."""
    rng = np.random.default_rng([seed, length, list(TASKS).index(task)])
    return [make_prompt(rng, prose, task, length, DEPTHS[i % len(DEPTHS)]) for i in range(n)]


def score_by_depth(prompts: Sequence[NeedlePrompt], right: Sequence[bool]) -> dict[float, float]:
    """The share of right answers at each depth."""
    by_depth: dict[float, list[bool]] = {}
    for prompt, is_right in zip(prompts, right, strict=True):
        by_depth.setdefault(prompt.depth, []).append(bool(is_right))
    return {depth: sum(answers) / len(answers) for depth, answers in sorted(by_depth.items())}
