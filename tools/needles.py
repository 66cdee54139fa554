"""Facts hidden in prose: rows that teach retrieval, prompts that test it, and the score.

    python tools/needles.py --model models/demo --text book.txt --kv dense --length 8192

prints the share of fresh prompts whose answer is right, by depth. The wordings of the score:

    ... The pass key is 48213. Remember it. ...   What is the pass key? The pass key is
    ... The code of the red door is 90417. ...    What is the code of the red door? The code of the red door is
"""

from __future__ import annotations

import argparse
import dataclasses
import lzma
import pathlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import sentencepiece
from tqdm import tqdm

Ids = npt.NDArray[np.uint16]
Labels = npt.NDArray[np.uint8]
Row = tuple[Ids, Labels]
Piece = tuple[Sequence[int], int]  # token ids, and how many at their end are an answer
Rng = np.random.Generator

IGNORED, PROSE, COPY, ANSWER = range(4)  # what a token of a training row is to the loss
DEPTHS = tuple((i + 0.5) / 10 for i in range(10))
COLOURS = ("red", "blue", "green", "white", "black", "yellow", "brown", "grey")
THINGS = ("door", "gate", "house", "chest", "room", "box", "book", "boat")

# The score uses the first wording of each; training uses them all.
KEY_STATEMENTS = (
    "The pass key is {value}. Remember it.",
    "The pass key is {value}. Remember it. {value} is the pass key.",
    "Remember the pass key: it is {value}.",
)
KEY_QUESTIONS = (
    "What is the pass key? The pass key is",
    "What was the pass key? It was",
    "The pass key is",
)
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


@dataclasses.dataclass(frozen=True)
class Fact:
    """A needle: the digits to remember, what they belong to (None: the pass key), and the wording of both ends."""

    value: str
    name: str | None = None
    statement_wording: int = 0
    question_wording: int = 0

    @property
    def statement(self) -> str:
        wordings = CODE_STATEMENTS if self.name else KEY_STATEMENTS
        return wordings[self.statement_wording].format(name=self.name, value=self.value)

    @property
    def question(self) -> str:
        wordings = CODE_QUESTIONS if self.name else KEY_QUESTIONS
        return wordings[self.question_wording].format(name=self.name)

    def reworded(self, rng: Rng) -> Fact:
        return dataclasses.replace(
            self, statement_wording=int(rng.integers(3)), question_wording=int(rng.integers(3))
        )


def draw_value(rng: Rng) -> str:
    return str(rng.integers(10_000, 100_000))


def pass_key(rng: Rng) -> list[Fact]:
    """One 5-digit pass key."""
    return [Fact(draw_value(rng))]


def four_codes(rng: Rng) -> list[Fact]:
    """The 5-digit codes of four doors in random order; the first is the one to ask for."""
    return [Fact(draw_value(rng), f"{colour} door") for colour in rng.permutation(COLOURS[:4])]


TASKS: dict[str, Callable[[Rng], list[Fact]]] = {"pass-key": pass_key, "four-codes": four_codes}


def training_facts(rng: Rng, n: int) -> list[Fact]:
    """Up to ``n`` codes in any wording, half the time of like things; often a pass key replaces the first."""
    names = [f"{COLOURS[i % 8]} {THINGS[i // 8]}" for i in rng.choice(64, size=n, replace=False)]
    if rng.random() < 0.5:
        thing = rng.choice(THINGS)
        names = [f"{colour} {thing}" for colour in rng.permutation(COLOURS)[:n]]
    facts = [Fact(draw_value(rng), name) for name in names]
    if rng.random() < 0.6:
        facts[0] = Fact(draw_value(rng))
    return [fact.reworded(rng) for fact in facts]


class Prose:
    """A tokenised text to hide facts in; pieces go between its sentences.

    tokens: (n_tokens,) ids of `tokenizer`, a sentencepiece model with BOS and a "\\n" piece.
    """

    def __init__(self, tokens: Ids, tokenizer: sentencepiece.SentencePieceProcessor) -> None:
        self.tokens, self.tokenizer = tokens, tokenizer
        pieces = [tokenizer.id_to_piece(i) for i in range(tokenizer.vocab_size())]
        ends = np.array([piece.rstrip("\"'").endswith((".", "?", "!")) for piece in pieces])
        words = np.array([piece.startswith(("▁", "\n")) for piece in pieces])
        self.breaks = np.flatnonzero(ends[tokens[:-1]] & words[tokens[1:]]) + 1

    def continuing(self, text: str) -> list[int]:
        """Ids of text that follows other text: no BOS, and no space that is not in it."""
        return self.tokenizer.encode("\n" + text)[2:]  # drops "▁" and "\n"

    def stretch(self, rng: Rng, n_tokens: int) -> tuple[Ids, npt.NDArray[np.int64]]:
        """``n_tokens`` from anywhere or from the start of a sentence, and where in them sentences begin."""
        n_starts = len(self.tokens) - n_tokens + 1
        if n_starts < 1:
            raise ValueError(f"the text has {len(self.tokens)} tokens, too few for a row of {n_tokens}")
        start = int(rng.integers(n_starts))
        if rng.random() < 0.5:
            start = int(self.breaks[max(0, np.searchsorted(self.breaks, start, side="right") - 1)])
            start = min(start, n_starts - 1)
        first, last = np.searchsorted(self.breaks, [start, start + n_tokens])
        return self.tokens[start : start + n_tokens], self.breaks[first:last] - start

    def weave(self, rng: Rng, pieces: Iterable[tuple[float, Piece]], length: int) -> Row:
        """BOS and prose with each piece before the sentence after its place (0 to 1): (length,) ids and labels."""
        placed = sorted(pieces, key=lambda piece: piece[0])
        room = length - 1 - sum(len(ids) for _, (ids, _) in placed)
        text, breaks = self.stretch(rng, room)
        cuts = np.append(breaks, room)
        row, labels = [np.array([self.tokenizer.bos_id()])], [np.array([IGNORED])]
        done = 0
        for place, (ids, n_answer) in placed:
            cut = int(cuts[np.searchsorted(cuts, min(place, 1.0) * room)])
            row += [text[done:cut], np.array(ids)]
            labels += [np.full(cut - done, PROSE), np.repeat([IGNORED, ANSWER], [len(ids) - n_answer, n_answer])]
            done = cut
        row.append(text[done:])
        labels.append(np.full(room - done, PROSE))
        return np.concatenate(row).astype(np.uint16), np.concatenate(labels).astype(np.uint8)


def prose_row(rng: Rng, prose: Prose, length: int) -> Row:
    """Plain text."""
    return prose.weave(rng, [], length)


def copy_row(rng: Rng, prose: Prose, length: int) -> Row:
    """Prose, then spans of 8 to 64 tokens in random order, many times each; a span's first token never counts.

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
    """Prose with 1 to 12 facts anywhere and 1 to 16 questions, each behind its fact, half of them near the end.

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
    return prose.weave(rng, pieces, length)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A test: ids that end in a question, and the ids of the digits that answer it."""

    ids: list[int]
    answer: list[int]
    depth: float


def make_prompt(rng: Rng, prose: Prose, task: str, length: int, depth: float) -> Prompt:
    """Prompt and answer take ``length`` tokens together; the fact asked for is at ``depth`` (0 to 1).

    Other facts, which must not be confused with it, are anywhere.
    """
    facts = TASKS[task](rng)
    pieces: list[tuple[float, Piece]] = []
    for i, fact in enumerate(facts):
        pieces.append((depth if i == 0 else rng.random(), (prose.continuing(" " + fact.statement), 0)))
    answer = prose.continuing(" " + facts[0].value)
    pieces.append((1.0, (prose.continuing("\n\n" + facts[0].question) + answer, len(answer))))
    ids = prose.weave(rng, pieces, length)[0].tolist()
    return Prompt(ids[: -len(answer)], answer, depth)


def make_prompts(prose: Prose, task: str, length: int, n: int = 100, seed: int = 0) -> list[Prompt]:
    """``n`` fresh prompts, spread evenly over the ten depths."""
    rng = np.random.default_rng([seed, length, list(TASKS).index(task)])
    return [make_prompt(rng, prose, task, length, DEPTHS[i % len(DEPTHS)]) for i in range(n)]


def score_by_depth(prompts: Sequence[Prompt], right: Sequence[bool]) -> dict[float, float]:
    """The share of right answers at each depth."""
    by_depth: dict[float, list[bool]] = {}
    for prompt, is_right in zip(prompts, right, strict=True):
        by_depth.setdefault(prompt.depth, []).append(bool(is_right))
    return {depth: sum(answers) / len(answers) for depth, answers in sorted(by_depth.items())}


def read_text(path: pathlib.Path) -> str:
    """A UTF-8 text, plain or .xz."""
    return lzma.open(path, "rt", encoding="utf-8").read() if path.suffix == ".xz" else path.read_text("utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/demo", help="folder with a sentencepiece tokenizer.model")
    parser.add_argument("--text", type=pathlib.Path, required=True, help="prose to hide facts in (.txt or .xz)")
    parser.add_argument("--kv", default="dense", help="KV cache scheme (default: dense)")
    parser.add_argument("--task", choices=TASKS, action="append", help="default: all")
    parser.add_argument("--length", type=int, default=8192, help="tokens of prompt and answer (default: 8192)")
    parser.add_argument("-n", type=int, default=100, help="prompts per task (default: 100)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    vocabulary = pathlib.Path(args.model, "tokenizer.model")
    if not vocabulary.is_file():
        parser.error(f"{vocabulary} is missing; --model must be a folder with a sentencepiece tokenizer")

    from edgekv import Session

    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(vocabulary))
    prose = Prose(np.array(tokenizer.encode(read_text(args.text)), np.uint16), tokenizer)
    session = Session.load(args.model, kv=args.kv, ctx=args.length)
    for task in args.task or TASKS:
        prompts, right = make_prompts(prose, task, args.length, args.n, args.seed), []
        for prompt in tqdm(prompts, desc=task, disable=None):  # shown on a terminal only
            session.reset()
            steps = session.generate(prompt.ids, max_new_tokens=len(prompt.answer))
            right.append([step.token for step in steps] == prompt.answer)
        for depth, share in score_by_depth(prompts, right).items():
            print(f"{task} {args.length} tokens, depth {depth:.0%}: {share:.0%}")
        print(f"{task} {args.length} tokens, --kv {args.kv}: {sum(right)} of {len(right)} right", flush=True)


if __name__ == "__main__":
    main()
