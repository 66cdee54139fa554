"""What `edgekv board` measures, the most telling first: a slow machine gets the rows of the small shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from edgekv.board import measure
from edgekv.board.energy import Metering
from edgekv.board.measure import Opened
from edgekv.board.record import Board, Measured, Plan, bandwidth_key, decode_key, prompt_key, threads_key
from edgekv.linear.threads import candidates

FULL = Plan(
    shapes=("qwen3-0.6b", "llama3.2-1b", "qwen3-1.7b", "llama3.2-3b", "qwen3-4b", "llama3.1-8b"),
    schemes=("dense", "onebit", "planes", "kivi2", "h1b"),
    depths=(0, 2048, 8192),
    prompt=512,
    threads_prompt=128,
    weights="int4",
    seconds=3.0,
    idle_s=5.0,
)
QUICK = Plan(
    shapes=("tiny",),
    schemes=("dense", "onebit"),
    depths=(0, 256),
    prompt=64,
    threads_prompt=32,
    weights="int4",
    seconds=0.05,
    idle_s=0.1,
)
"""A smoke: that everything runs, on a model so small that its figures say nothing."""
EVERY_NUMBER = 4  # up to so many cores the bandwidth of each number of threads is measured


@dataclasses.dataclass(frozen=True)
class Step:
    """One measurement. ``shape`` is opened for it, on ``threads``; ``kind`` is what costs alike on other shapes.

    kv, depth: of the cache that it fills.
    """

    key: str
    kind: str
    run: Callable[[Opened, Metering, Board], Measured]
    shape: str
    threads: int | None = None
    kv: str = "dense"
    depth: int = 0


@dataclasses.dataclass(frozen=True)
class Probe:
    """A measurement of the machine alone."""

    key: str
    run: Callable[[], Measured]


def probes(cores: int) -> Iterator[Probe]:
    """Memory by numbers of threads."""
    numbers = range(1, cores + 1) if cores <= EVERY_NUMBER else sorted({1, 2, *candidates(cores)})
    for n in numbers:
        yield Probe(bandwidth_key(n), lambda n=n: measure.bandwidth(n))  # type: ignore[misc]


def steps(plan: Plan, cores: int) -> Iterator[Step]:
    """Shape by shape; the first one also with other numbers of threads."""
    for n in candidates(cores):
        yield _threads_step(plan.shapes[0], n, plan)
    first, *others = plan.schemes
    shallow, *deeper = plan.depths
    for shape in plan.shapes:
        yield _decode_step(shape, first, shallow, plan)
        yield _prompt_step(shape, first, plan)
        for depth in deeper:
            for kv in plan.schemes:
                yield _decode_step(shape, kv, depth, plan)
        for kv in others:
            yield _decode_step(shape, kv, shallow, plan)


def _threads_step(shape: str, n: int, plan: Plan) -> Step:
    return Step(
        key=threads_key(shape, n),
        kind="threads",
        run=lambda opened, metering, board: measure.threads_row(opened, n, plan),
        shape=shape,
        threads=n,
    )


def _decode_step(shape: str, kv: str, depth: int, plan: Plan) -> Step:
    return Step(
        key=decode_key(shape, kv, depth),
        kind=f"{kv} at {depth}",
        run=lambda opened, metering, board: measure.decode(opened, kv, depth, plan, metering, board.idle),
        shape=shape,
        threads=plan.threads,
        kv=kv,
        depth=depth,
    )


def _prompt_step(shape: str, kv: str, plan: Plan) -> Step:
    return Step(
        key=prompt_key(shape, kv, plan.prompt),
        kind="prompt",
        run=lambda opened, metering, board: measure.prompt(opened, kv, plan, metering, board.idle),
        shape=shape,
        threads=plan.threads,
        kv=kv,
        depth=plan.prompt,
    )
