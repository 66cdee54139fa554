"""python -m tests.fuzz --seconds N, or --cases N: as many cases of all kinds as fit; exit status 1 if any failed.

Each failure is printed as KIND:SEED with its reason, and written to --out; `--case KIND:SEED` runs it again, here.
To keep it from coming back, add its line to tests/fuzz/corpus.txt.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pathlib
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence

from . import model_kinds, use_kinds  # noqa: F401 - they register their kinds
from .material import Material
from .mutate import KINDS, RARE
from .runner import Case, ready, run, run_case


def cases(seed: int, kinds: Sequence[str]) -> Iterator[Case]:
    """Yields cases without an end: in each round every kind, but the slow ones in few."""
    rng = random.Random(seed)
    for n in itertools.count():
        for kind in kinds:
            if n % RARE.get(kind, 1) == 0:
                yield kind, rng.randrange(1 << 48)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, metavar="N", help="how many (default: what --seconds allow)")
    parser.add_argument("--seconds", type=float, help="how long (default 60, without --cases)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(KINDS), help="default: all")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("fuzz-failures.txt"))
    parser.add_argument("--case", metavar="KIND:SEED", help="run one case here and keep its files")
    arguments = parser.parse_args()
    os.environ.setdefault("EDGEKV_FUZZ_SECONDS", "0")  # workers use all material
    if arguments.case:
        kind, _, seed = arguments.case.partition(":")
        folder = pathlib.Path(tempfile.mkdtemp(prefix="edgekv-case-"))
        (folder / "case").mkdir()
        print(f"its files: {folder}/case", file=sys.stderr)
        made = Material(folder / "material")
        ready()
        run_case(kind, int(seed), made, folder / "case")
        return 0
    seconds = arguments.seconds or (None if arguments.cases else 60)
    drawn = itertools.islice(cases(arguments.seed, arguments.kinds.split(",")), arguments.cases)
    tally = run(drawn, seconds)
    for (kind, seed), reason in tally.failures:
        print(line := f"{kind}:{seed}\n{reason}\n")
        with arguments.out.open("a") as file:
            file.write(line)
    for kind in dict.fromkeys(kind for kind, _ in sorted(tally.counts)):
        n = {outcome: tally.counts[kind, outcome] for outcome in ("success", "error", "failure")}
        each = "".join(f"{n[outcome]:>9}" for outcome in n)
        print(f"{kind:<16}{each}{sum(n.values()) / tally.seconds[kind]:>9.1f} a second")
    print(f"{tally.n_cases} cases, {len(tally.failures)} failures")
    return int(bool(tally.failures))


if __name__ == "__main__":
    sys.exit(main())
