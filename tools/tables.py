"""The tables of docs/reproduction.md: what the papers print, what edgekv measures.

    python tools/tables.py                     rewrites the page's tables and its plot from docs/data
    python tools/tables.py --check             exit 1 when the page is out of date
    python tools/tables.py commands            prints every command that docs/data/tables-*.json come from
    python tools/tables.py run --models M --texts T --adapters A --work W --jobs N
                                               runs those that W has no outcome of, then collects all
    python tools/tables.py bytes --kv h1b,onebit --shape llama2-7b
                                               bytes of caches for a shape of models/, at 8,192 tokens

M holds gpt2-60m and llama-40m, T heldout3.txt, test.txt (WikiText-2) and ptb.test.txt, A the adapters by name.
The page has blocks <!-- table: NAME [MODEL or TASK] --> ... <!-- /table -->; what is between is replaced.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import re
import shlex
import sys
from collections.abc import Callable

import tables_fier as fier
import tables_h1b as h1b
import tables_plot
from tables_data import cache_bytes
from tables_paper import SHAPE2
from tables_runs import ROOT, CommandRunner, Places, Run, collect, evals, needles

from edgekv.kvcache import CacheSpec

PAGE = ROOT / "docs" / "reproduction.md"
PLOT = ROOT / "docs" / "reproduction-fig1.svg"
BLOCK = re.compile(r"(<!-- table: (\S+)(?: (\S+))? -->\n).*?(<!-- /table -->)", re.DOTALL)
TABLES: dict[str, Callable[..., str]] = {
    "table1": h1b.table1,
    "adapted": h1b.adapted,
    "table2": h1b.table2,
    "table5": h1b.table5,
    "arithmetic": h1b.arithmetic,
    "qpb": h1b.qpb,
    "by-depth": fier.by_depth,
    "by-budget": fier.by_budget,
    "by-length": fier.by_length,
}


def updated(page: str) -> str:
    def fill(match: re.Match[str]) -> str:
        return match[1] + TABLES[match[2]](*filter(None, [match[3]])) + match[4]

    return BLOCK.sub(fill, page)


def chosen(only: str) -> list[Run]:
    return [run for run in (*evals(), *needles()) if re.search(only, run.name)]


def add_run_options(parser: argparse.ArgumentParser) -> None:
    for name in ("models", "texts", "adapters", "work"):
        parser.add_argument(f"--{name}", type=pathlib.Path, default=pathlib.Path(name), metavar="FOLDER")
    parser.add_argument("--device", default="cpu", help="of evaluations: cpu, or cuda for the schemes that it has")
    parser.add_argument("--jobs", type=int, default=1, help="commands at a time, sharing the cores (default: 1)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long (default: never)")
    parser.add_argument("--only", default="", metavar="REGEX", help="runs whose name has this")


def print_bytes(shape: str, kvs: str) -> None:
    for spec in CacheSpec.parse_list(kvs):
        print(f"{cache_bytes(shape, str(spec)):>16,}  {spec}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when the page is out of date")
    verbs = parser.add_subparsers(dest="verb")
    for verb in ("commands", "run"):
        add_run_options(verbs.add_parser(verb))
    sizes = verbs.add_parser("bytes")
    sizes.add_argument("--shape", default=SHAPE2, help=f"default: {SHAPE2}")
    sizes.add_argument("--kv", required=True, metavar="LIST", help="schemes, comma-separated")
    args = parser.parse_args(arguments)
    if args.verb is None:
        return page(args.check)
    if args.verb == "bytes":
        print_bytes(args.shape, args.kv)
        return 0
    places = Places(args.models.absolute(), args.texts.absolute(), args.adapters.absolute(), args.device)
    runs = chosen(args.only)
    if args.verb == "commands":
        for run in runs:
            print(shlex.join(run.command(places, 1, args.work / f"{run.name}.json")))
        return 0
    CommandRunner(places, args.work, args.jobs, args.seconds).run(runs)
    collect(places, args.work)
    return 0


def page(check: bool) -> int:
    """Rewrites the page and its plot, or says whether the page is as it should be."""
    text = PAGE.read_text()
    fresh = updated(text)
    if check:
        return int(fresh != text)
    PAGE.write_text(fresh)
    tables_plot.draw(PLOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
