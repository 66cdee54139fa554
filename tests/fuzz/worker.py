"""A process that runs cases, so that a crash ends it and not the run: a line of JSON in, a line of JSON out."""

from __future__ import annotations

import json
import os
import pathlib
import resource
import shutil
import sys
import traceback
import warnings
from random import Random
from typing import Any

from edgekv import EdgeKVError
from edgekv.engine import loading
from edgekv.files import cache_root

MEMORY = 2 << 30  # beyond what the process has when it is ready
ANSWER = "\x1fanswer "


def main() -> None:
    scratch = pathlib.Path(sys.argv[1])
    os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_root() / "kernels"))
    os.environ["XDG_CACHE_HOME"] = str(scratch / "cache")
    warnings.simplefilter("ignore")
    from . import kinds  # noqa: F401 - takes longer than a case may
    from .material import Material

    made = (
        None
        if "EDGEKV_FUZZ_SELF_TEST" in os.environ
        else Material(scratch / "material", "EDGEKV_FUZZ_SECONDS" in os.environ)
    )
    ready()
    taken = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    bound = taken + MEMORY if most == resource.RLIM_INFINITY else min(taken + MEMORY, most)
    resource.setrlimit(resource.RLIMIT_AS, (bound, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    say({"ready": True})
    for line in sys.stdin:
        kind, seed = json.loads(line)
        folder = scratch / "case"
        folder.mkdir()
        try:
            run_case(kind, seed, made, folder)
            outcome = "success"
        except EdgeKVError as error:
            outcome = "error" if "\n" not in str(error) else f"an error of several lines: {str(error)[:500]}"
        except BaseException:
            outcome = traceback.format_exc()
        say({"outcome": outcome})
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(scratch / "cache", ignore_errors=True)


def ready() -> None:
    """What no case is about takes no time from now on: writes that reach the disk, kernels compiled ahead."""
    os.fsync = lambda descriptor: None  # type: ignore[assignment]
    loading.warm_up = lambda *_: 0.0


def run_case(kind: str, seed: int, made: Any, folder: pathlib.Path) -> None:
    """One case in its folder, which is the working folder too."""
    from .kinds import KINDS

    here = pathlib.Path.cwd()
    os.chdir(folder)
    try:
        KINDS[kind](made, folder, Random(f"{kind} {seed}"))
    finally:
        os.chdir(here)


def say(value: object) -> None:
    """Libraries may print to standard output too."""
    print(f"\n{ANSWER}{json.dumps(value)}", flush=True)


if __name__ == "__main__":
    main()
