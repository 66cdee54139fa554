"""Writes facts hidden in prose: rows that teach retrieval, in more wordings than `edgekv.eval.gate` asks in."""

from __future__ import annotations

import dataclasses
import lzma
import pathlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgekv.eval import gate
from edgekv.eval.gate import COLOURS, THINGS, Prose, Rng, draw_names, draw_value

Ids = npt.NDArray[np.uint16]
Labels = npt.NDArray[np.uint8]
Row = tuple[Ids, Labels]
Piece = tuple[Sequence[int], int]  # token ids, and how many at their end are an answer

KEY_STATEMENTS = (
    "The pass key is {value}. Remember it.",
    "The pass key is {value}. Remember it. {value} is the pass key.",
    "Remember the pass key: it is {value}.",
)
KEY_QUESTIONS = ("What is the pass key? The pass key is", "What was the pass key? It was", "The pass key is")
CODE_STATEMENTS = (
    "The code of the {name} is {value}.",
    "The code for the {name} is {value}.",
    "Remember that the {name} has the code {value}.",
)
CODE_QUESTIONS = (
    "What is the code of the {name}? The code of the {name} is",
    "What was the code for the {name}? It was",
    "The code of the {name} is",
)
IGNORED, PROSE, COPY, ANSWER = range(4)  # what a token of a training row is to the loss


@dataclasses.dataclass(frozen=True)
class Fact(gate.Fact):
    """A fact in one of three wordings at either end; scores use the first ones."""

    statement_wording: int = 0
    question_wording: int = 0

    @property
    def statement(self) -> str:
        """Returns the sentence that is hidden."""
        wording = (CODE_STATEMENTS if self.name else KEY_STATEMENTS)[self.statement_wording]
        return wording.format(name=self.name, value=self.value)

    @property
    def question(self) -> str:
        """Returns the question that asks for it, up to where the digits come."""
        return (CODE_QUESTIONS if self.name else KEY_QUESTIONS)[self.question_wording].format(name=self.name)


def training_facts(rng: Rng, n: int) -> list[Fact]:
    """Draws up to ``n`` codes in any wording, half the time of like things; a pass key may be the first."""
    names = draw_names(rng, n)
    if rng.random() < 0.5:
        thing = rng.choice(THINGS)
        names = [f"{colour} {thing}" for colour in rng.permutation(COLOURS)[:n]]
    facts = [Fact(draw_value(rng), name) for name in names]
    if rng.random() < 0.6:
        facts[0] = Fact(draw_value(rng))
    return [reworded(fact, rng) for fact in facts]


def reworded(fact: Fact, rng: Rng) -> Fact:
    """Returns the same fact in wordings drawn at random."""
    return dataclasses.replace(fact, statement_wording=int(rng.integers(3)), question_wording=int(rng.integers(3)))


def woven(rng: Rng, prose: Prose, pieces: Sequence[tuple[float, Piece]], length: int) -> Row:
    """Returns prose with the pieces at their places (0 to 1), and what every token is: (length,) each."""
    ids, owners = prose.weave(rng, [(place, ids) for place, (ids, _) in pieces], length)
    labels = np.where(owners < 0, PROSE, IGNORED).astype(np.uint8)
    labels[: len(prose.start)] = IGNORED
    for i, (_, (piece, n_answer)) in enumerate(pieces):
        labels[np.flatnonzero(owners == i)[len(piece) - n_answer :]] = ANSWER
    return ids.astype(np.uint16), labels


def prose_row(rng: Rng, prose: Prose, length: int) -> Row:
    """Returns a row of plain text."""
    return woven(rng, prose, [], length)


def copy_row(rng: Rng, prose: Prose, length: int) -> Row:
    """Returns prose, then spans of 8 to 64 tokens in random order, repeated; a span's first token never counts.

    Half the spans are text, half are tokens in random order, which only copying can predict.
    """
    spans = []
    for _ in range(rng.integers(2, 9)):
        n = int(rng.integers(8, 65))
        text = prose.stretch(rng, n)[0]
        spans.append(text if rng.random() < 0.5 else rng.choice(prose.tokens, size=n))
    row, labels = prose_row(rng, prose, int(rng.integers(2, length // 2)))
    seen = set()
    while len(row) < length:
        i = int(rng.integers(len(spans)))
        row = np.concatenate([row, spans[i]])
        labels = np.append(labels, [IGNORED] + [COPY if i in seen else IGNORED] * (len(spans[i]) - 1))
        seen.add(i)
    return row[:length], labels[:length].astype(np.uint8)


def recall_row(rng: Rng, prose: Prose, length: int) -> Row:
    """Returns prose with 1 to 12 facts anywhere and 1 to 16 questions behind them, half of them near the end.

    Short rows get fewer: facts may fill four tenths of a row, questions with their answers five tenths.
    """
    facts = training_facts(rng, int(rng.integers(1, 13)))
    places = rng.random(len(facts)) * 0.95
    pieces: list[tuple[float, Piece]] = []
    room = 0.4 * length
    for fact, place in zip(facts, places, strict=True):
        ids = prose.continuing(rng.choice([" ", "\n\n"], p=[0.75, 0.25]) + fact.statement)
        if len(ids) > room:
            break
        pieces.append((place, (ids, 0)))
        room -= len(ids)
    n_facts, room = len(pieces), room + 0.5 * length
    for _ in range(rng.integers(1, 17)):
        i = int(rng.integers(n_facts))
        question = prose.continuing(rng.choice([" ", "\n\n"]) + facts[i].question)
        answer = prose.continuing(f" {facts[i].value}.")
        if len(question) + len(answer) > room:
            break
        earliest = places[i] if rng.random() < 0.5 else max(places[i], 0.9)
        pieces.append((rng.uniform(earliest, 1.05), (question + answer, len(answer))))
        room -= len(question) + len(answer)
    return woven(rng, prose, pieces, length)


def read_text(path: pathlib.Path) -> str:
    """Reads a UTF-8 text, plain or .xz."""
    return lzma.open(path, "rt", encoding="utf-8").read() if path.suffix == ".xz" else path.read_text("utf-8")
