"""python -m tests.fuzz --seconds N --seed S: as many cases of all kinds as fit; exit status 1 if any failed.

Each failure is printed as KIND:SEED with its reason, and written to --out; `--case KIND:SEED` runs it again, here.
To keep it from coming back, add its line to tests/fuzz/corpus.txt.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import pathlib
import random
import sys
import tempfile
from collections.abc import Iterator

from .kinds import KINDS
from .material import Material
from .runner import Case, Tally, run


def cases(seed: int, kinds: list[str]) -> Iterator[Case]:
    """Endless; the kinds in turn."""
    rng = random.Random(seed)
    for kind in itertools.cycle(kinds):
        yield kind, rng.randrange(1 << 48)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="how long (default 60)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(KINDS), help="default: all")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("fuzz-failures.txt"))
    parser.add_argument("--case", metavar="KIND:SEED", help="run one case here and keep its files")
    arguments = parser.parse_args()
    if arguments.case:
        kind, _, seed = arguments.case.partition(":")
        folder = pathlib.Path(tempfile.mkdtemp(prefix="edgekv-case-"))
        (folder / "case").mkdir()
        print(f"its files: {folder}/case", file=sys.stderr)
        KINDS[kind](Material(folder / "material"), folder / "case", random.Random(f"{kind} {seed}"))
        return 0
    chosen = arguments.kinds.split(",")
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        seeds = [arguments.seed + (i << 32) for i in range(arguments.jobs)]
        tallies = list(pool.map(lambda seed: run(cases(seed, chosen), arguments.seconds), seeds))
    whole = Tally()
    for tally in tallies:
        whole.counts += tally.counts
        whole.failures += tally.failures
    for (kind, outcome), n in sorted(whole.counts.items()):
        print(f"{kind:<12}{outcome:<10}{n:>8}")
    print(f"{whole.n_cases} cases, {len(whole.failures)} failures")
    for (kind, seed), reason in whole.failures:
        line = f"{kind}:{seed}\n{reason}\n"
        print(line)
        with arguments.out.open("a") as file:
            file.write(line)
    return int(bool(whole.failures))


if __name__ == "__main__":
    sys.exit(main())
