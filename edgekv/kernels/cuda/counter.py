"""Counts of tokens in a recorded step, which finds others when it is replayed.

A recorded launch keeps its arguments. So, while a step is recorded, the counters of the caches are `Counter`s,
which remember through sums and differences what they were made of; a launch passes such a number together with an
address (`place`), at which every replay puts how far the number has moved since.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from edgekv.kernels.cuda.driver import N_MOVES, Array, CannotRecord, Driver, Launch, Program

RECORDED_TOKENS = 512  # at most, after the one at which a step was recorded, that replay it
INPUTS = Launch(Program(("small",)), "set_inputs", (1,), 1)

Terms = tuple[tuple[Hashable, int], ...]
"""Counters that are added up, by their names, and how often each."""


class Counter(int):
    """An int that will be another one. Comparisons see that of the recording; divisions can't be recorded."""

    terms: Terms
    moves: Moves

    def __new__(cls, value: int, terms: Terms, moves: Moves) -> Counter:
        self = super().__new__(cls, value)
        self.terms, self.moves = terms, moves
        return self

    def _with(self, value: int, other: Any, sign: int, own: int = 1) -> Counter:
        factors = {name: own * n for name, n in self.terms}
        for name, n in other.terms if isinstance(other, Counter) else ():
            factors[name] = factors.get(name, 0) + sign * n
        terms = sorted(((name, n) for name, n in factors.items() if n), key=repr)
        return Counter(value, tuple(terms), self.moves)

    def __add__(self, other: int) -> Counter:
        return self._with(int(self) + int(other), other, 1)

    __radd__ = __add__

    def __sub__(self, other: int) -> Counter:
        return self._with(int(self) - int(other), other, -1)

    def __rsub__(self, other: int) -> Counter:
        return self._with(int(other) - int(self), other, 1, own=-1)

    def __floordiv__(self, other: int) -> int:
        raise CannotRecord(f"{self.terms} // {other}")

    def __mod__(self, other: int) -> int:
        raise CannotRecord(f"{self.terms} % {other}")


class Moves:
    """Where on the device the sums of counters that a recording uses find how far they have moved."""

    def __init__(self, driver: Driver, positions: Hashable) -> None:
        """positions: the counter that the driver's `shift` follows."""
        self._driver = driver
        self._slots: dict[Terms, int] = {((positions, 1),): 0}

    def address(self, terms: Terms) -> Array:
        """Raises CannotRecord where there are too many."""
        slot = self._slots.setdefault(terms, len(self._slots))
        if slot >= N_MOVES - 1:
            raise CannotRecord(f"{slot} sums of counters")
        return self._driver.moves[slot : slot + 1]

    def set(self, ids: Array, token: int, moved: Callable[[Hashable], int]) -> None:
        """Puts the token, and what all have moved by, of counters that have each moved by ``moved``(name)."""
        values = [sum(n * moved(name) for name, n in terms) for terms in self._slots]
        put_inputs(self._driver, ids, token, values)


def put_inputs(driver: Driver, ids: Array, token: int, values: list[int]) -> None:
    """What a recorded step reads; positions and all others move by 0 where values has none."""
    padded = [*values, *[0] * (N_MOVES - 1 - len(values))]
    driver.launch(INPUTS, ids, token, driver.moves, *padded)


def place(driver: Driver, x: int) -> tuple[int, Array]:
    """A number for a kernel, and the address of what that adds to it."""
    if isinstance(x, Counter) and x.terms:
        return int(x), x.moves.address(x.terms)
    return int(x), driver.still
