"""Facts hidden in prose: rows that teach retrieval, prompts that test it, and the score.

    python tools/train/needles.py --model models/demo --text book.txt --kv dense --length 8192

prints the share of fresh prompts whose answer is right, by depth. The wordings of the score:

    ... The pass key is 48213. Remember it. ...   What is the pass key? The pass key is
    ... The code of the red door is 90417. ...    What is the code of the red door? The code of the red door is
"""

from __future__ import annotations

import argparse
import dataclasses
import lzma
import pathlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from edgekv import Session
from edgekv.eval.needles import (
    COLOURS,
    THINGS,
    Fact,
    Prose,
    Rng,
    draw_names,
    draw_value,
)

Ids = npt.NDArray[np.uint16]
Labels = npt.NDArray[np.uint8]
Row = tuple[Ids, Labels]
Piece = tuple[Sequence[int], int]  # token ids, and how many at their end are an answer

IGNORED, PROSE, COPY, ANSWER = range(4)  # what a token of a training row is to the loss


def training_facts(rng: Rng, n: int) -> list[Fact]:
    """Up to ``n`` codes in any wording, half the time of like things; often a pass key replaces the first."""
    names = draw_names(rng, n)
    if rng.random() < 0.5:
        thing = rng.choice(THINGS)
        names = [f"{colour} {thing}" for colour in rng.permutation(COLOURS)[:n]]
    facts = [Fact(draw_value(rng), name) for name in names]
    if rng.random() < 0.6:
        facts[0] = Fact(draw_value(rng))
    return [reworded(fact, rng) for fact in facts]


def reworded(fact: Fact, rng: Rng) -> Fact:
    """The same fact in wordings drawn at random."""
    return dataclasses.replace(fact, statement_wording=int(rng.integers(3)), question_wording=int(rng.integers(3)))


def woven(rng: Rng, prose: Prose, pieces: Sequence[tuple[float, Piece]], length: int) -> Row:
    """Prose with the pieces at their places (0 to 1), and what every token is: (length,) each."""
    ids, owners = prose.weave(rng, [(place, ids) for place, (ids, _) in pieces], length)
    labels = np.where(owners < 0, PROSE, IGNORED).astype(np.uint8)
    labels[: len(prose.start)] = IGNORED
    for i, (_, (piece, n_answer)) in enumerate(pieces):
        labels[np.flatnonzero(owners == i)[len(piece) - n_answer :]] = ANSWER
    return ids.astype(np.uint16), labels


def prose_row(rng: Rng, prose: Prose, length: int) -> Row:
    """Plain text."""
    return woven(rng, prose, [], length)


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
    return woven(rng, prose, pieces, length)


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


def read_text(path: pathlib.Path) -> str:
    """A UTF-8 text, plain or .xz."""
    return lzma.open(path, "rt", encoding="utf-8").read() if path.suffix == ".xz" else path.read_text("utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/demo", help="a model with its tokenizer (default: models/demo)")
    parser.add_argument("--text", type=pathlib.Path, required=True, help="prose to hide facts in (.txt or .xz)")
    parser.add_argument("--kv", default="dense", help="KV cache scheme (default: dense)")
    parser.add_argument("--task", choices=TASKS, action="append", help="default: all")
    parser.add_argument("--length", type=int, default=8192, help="tokens of prompt and answer (default: 8192)")
    parser.add_argument("-n", type=int, default=100, help="prompts per task (default: 100)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    session = Session.load(args.model, kv=args.kv, ctx=args.length)
    tokenizer = session.require_tokenizer()
    prose = Prose(np.array(tokenizer.encode(read_text(args.text), bos=False)), tokenizer)
    for task in args.task or TASKS:
        prompts, right = make_prompts(prose, task, args.length, args.n, args.seed), []
        for prompt in tqdm(prompts, desc=task, disable=None):  # shown on a terminal only
            session.reset()
            steps = session.generate(prompt.ids, max_new_tokens=len(prompt.answer), temperature=0.0)
            right.append([step.token for step in steps] == prompt.answer)
        for depth, share in score_by_depth(prompts, right).items():
            print(f"{task} {args.length} tokens, depth {depth:.0%}: {share:.0%}")
        print(f"{task} {args.length} tokens, --kv {args.kv}: {sum(right)} of {len(right)} right", flush=True)


if __name__ == "__main__":
    main()
