"""What drafts bring: tokens/s with and without on answers that quote their prompt; how often rounding parts texts.

    python tools/drafts.py --model demo --model ../shared/models/llama-40m --kv dense,onebit
    python tools/drafts.py --model demo --parted ../shared/text/heldout3.txt.xz --weights f32,int8,int4,int4-32

A model that is too small to summarise gets the answer dictated, by a constraint that allows its tokens alone:
passes, drafts and times are those of a model that answers so. "free" is what the model itself says, greedily.
"""

from __future__ import annotations

import argparse
import lzma
import pathlib
import statistics

import numpy as np
from drafts_cases import CASES

from edgekv import Session
from edgekv.session.drafts import MOST, NGram
from edgekv.session.report import RunReport
from edgekv.types import F32

COMPARED = (
    "model",
    "weights",
    "kv",
    "answer",
    "tokens",
    "plain, tokens/s",
    "drafts, tokens/s",
    "ratio",
    "accepted",
    "tokens per pass",
    "text",
)
PARTED = ("model", "weights", "kv", "other choice", "rms of the logits' difference", "largest gap")


class Dictated:
    """The `Constraint` that a text is these tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self._left = tokens[::-1]

    def allowed(self, logits: F32) -> F32:
        masked = np.full_like(logits, -np.inf)
        masked[self._left[-1]] = 0
        return masked

    def accept(self, token: int) -> bool:
        self._left.pop()
        return not self._left


def answer(
    session: Session, prompt: list[int], dictated: list[int] | None, draft: bool
) -> tuple[list[int], RunReport]:
    session.reset()
    session.runner.drafts = NGram() if draft else None
    constraint = None if dictated is None else Dictated(dictated)
    n = 256 if dictated is None else len(dictated)
    tokens = [step.token for step in session.generate(prompt, max_new_tokens=n, constraint=constraint)]
    return tokens, session.report()


def compare(session: Session, name: str, prompt: list[int], dictated: list[int] | None, rounds: int) -> None:
    """Plain and drafted in turns, so that both have the same machine; prints a row."""
    speeds: dict[bool, list[float]] = {False: [], True: []}
    texts = {}
    for _ in range(rounds):
        for draft in (False, True):
            texts[draft], report = answer(session, prompt, dictated, draft)
            speeds[draft].append(report.decode_tokens_per_s or 0.0)
    counts = report.drafts
    assert counts is not None
    plain, drafted = (statistics.median(speeds[draft]) for draft in (False, True))
    ratio = statistics.median(b / a for a, b in zip(speeds[False], speeds[True], strict=True))
    share = f"{100 * counts.accepted / counts.proposed:.0f}%" if counts.proposed else "-"
    same = next((i for i, (a, b) in enumerate(zip(*texts.values(), strict=False)) if a != b), None)
    per_pass = len(report.decode_latencies_s) / counts.passes
    print(
        f"| {session.model.path.name} | {session.plan.weights} | {session.plan.kv.short} | {name} "
        f"| {len(prompt)} + {len(texts[True])} | {plain:.1f} | {drafted:.1f} | {ratio:.2f} | {share} "
        f"| {per_pass:.2f} | {'equal' if same is None else f'parts at {same}'} |",
        flush=True,
    )


def parted(session: Session, ids: list[int]) -> None:
    """Each token's likeliest successor by passes of one and of up to 1 + MOST tokens; prints a row."""
    decoder, start = session.decoder, 300
    session.prefill(ids[:start])
    other = session.fork()
    other.copy_from(session)
    one: list[F32] = []
    several: list[F32] = []
    at = start
    while at < len(ids):
        n = max(1, min(1 + MOST, decoder.tentative_tokens(other.state.caches), len(ids) - at))
        rows = [decoder.step(token, session.state.caches).copy() for token in ids[at : at + n]]
        together = decoder.steps(ids[at : at + n], other.state.caches)
        if n > 1:
            one += rows
            several += list(together)
        at += n
    a, b = np.array(one), np.array(several)
    differ = a.argmax(1) != b.argmax(1)
    best = np.sort(a, axis=1)
    largest = max((best[:, -1] - best[:, -2])[differ], default=0.0)
    print(
        f"| {session.model.path.name} | {session.plan.weights} | {session.plan.kv.short} "
        f"| {differ.sum()} of {len(a)} | {np.sqrt(np.mean(np.square(a - b))):.1e} | {largest:.2f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", action="append", required=True)
    parser.add_argument("--kv", default="dense,onebit")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parted", metavar="FILE", help="count near-ties on this text (xz) instead")
    parser.add_argument("--tokens", type=int, default=1500, help="of that text")
    arguments = parser.parse_args()
    head = PARTED if arguments.parted else COMPARED
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for path in arguments.model:
        for weights in arguments.weights.split(","):
            for kv in arguments.kv.split(","):
                with Session.load(path, kv=kv, weights=weights, ctx=4096) as session:
                    if arguments.parted:
                        text = lzma.decompress(pathlib.Path(arguments.parted).read_bytes()).decode()[20_000:60_000]
                        parted(session, session.encode(text)[: arguments.tokens])
                        continue
                    for case in CASES:
                        prompt = session.encode(case.prompt)
                        whole = session.encode(case.prompt + case.answer)
                        compare(session, case.name, prompt, whole[len(prompt) :], arguments.rounds)
                        compare(session, f"{case.name}, free", prompt, None, arguments.rounds)


if __name__ == "__main__":
    main()
