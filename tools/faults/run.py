"""Seeds each fault of faults.py into a copy of the tree, runs the tests that it names, and prints what survived.

    python tools/faults/run.py [NUMBER ...] [--python PYTHON]    all, or those counted from 1, as 3 or 5-8
    python tools/faults/run.py --check                           only looks for each text and each test file

It exits with 1 where one survives. PYTHON has what the tests need; the package is the copy's.

A fault that survives is one that the tests would let through. "Caught" is told for a failing test: the named tests
have to pass without a fault. Kernels of a fault in compiled code are compiled anew, which is most of the time.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

from faults import FAULTS, Fault

ROOT = pathlib.Path(__file__).resolve().parents[2]
TIMEOUT_S = 1800  # a fault that makes a test wait for ever is caught too
FAILED = 1  # pytest's exit code for tests that fail, and for nothing else


class Misplaced(Exception):
    """An error: a fault's text or test file isn't there once."""


def place(fault: Fault, root: pathlib.Path) -> pathlib.Path:
    """Returns the file of the package that has the fault's text."""
    files = [path for path in (root / "edgekv").rglob("*") if path.suffix in (".py", ".cu", ".cuh", ".js")]
    counts = {path: path.read_text().count(fault.text) for path in files}
    found = [path for path, n in counts.items() for _ in range(n)]
    if len(found) != 1:
        where = ", ".join(str(path.relative_to(root)) for path in found) or "nowhere"
        raise Misplaced(f"{fault.what}: {fault.text!r} must be in one place, is in {where}")
    return found[0]


def tests_of(fault: Fault, root: pathlib.Path) -> list[str]:
    """Returns the fault's arguments of pytest, the test file by its path."""
    name, *rest = shlex.split(fault.tests)
    found = list((root / "tests").rglob(name))
    if len(found) != 1:
        raise Misplaced(f"{fault.what}: {len(found)} test files are called {name}")
    return [str(found[0]), *rest]


def misplaced(fault: Fault) -> str:
    """Returns what keeps the fault from being seeded, or an empty text."""
    try:
        place(fault, ROOT), tests_of(fault, ROOT)
    except Misplaced as error:
        return str(error)
    return ""


def numbers(text: str) -> range:
    """Returns the numbers of an argument such as 3 or 5-8."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def seed_and_test(fault: Fault, tree: pathlib.Path, kernels: pathlib.Path, python: str) -> str:
    """Returns "caught", "survived", or what kept the tests from running."""
    path, tests = place(fault, tree), tests_of(fault, tree)
    sound = path.read_text()
    faulty = sound.replace(fault.text, fault.replacement)
    if path.suffix == ".py":
        compile(faulty, path, "exec")
    is_compiled = "kernels" in path.parts or "jit" in sound
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "NUMBA_CACHE_DIR": tempfile.mkdtemp(dir=kernels) if is_compiled else str(kernels),
        "EDGEKV_SHARED": os.environ.get("EDGEKV_SHARED", str(ROOT.parent / "shared")),
    }
    where = [python, "-c", "import edgekv; print(edgekv.__file__)"]
    used = subprocess.run(where, cwd="/", env=environment, capture_output=True, text=True, check=True).stdout
    assert pathlib.Path(used.strip()).is_relative_to(tree), f"{used} is tested in place of the copy"
    command = [python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        path.write_text(faulty)
        done = subprocess.run(
            command, cwd=tree, env=environment, timeout=TIMEOUT_S, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        return "caught"
    finally:
        path.write_text(sound)
    if done.returncode == FAILED:
        return "caught"
    lines = (done.stdout + done.stderr).strip().splitlines() or ["nothing was printed"]
    return "survived" if done.returncode == 0 else f"not tested: pytest ended with {done.returncode} ({lines[-1]})"


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=numbers, metavar="NUMBER")
    parser.add_argument("--python", default=sys.executable, help="runs the tests (default: this one)")
    parser.add_argument("--check", action="store_true", help="look for the texts and the test files, run nothing")
    options = parser.parse_args()
    asked = [n for each in options.numbers or [range(1, len(FAULTS) + 1)] for n in each]
    chosen = [(n, fault) for n, fault in enumerate(FAULTS, 1) if n in asked]
    if options.check:
        lost = [found for _, fault in chosen if (found := misplaced(fault))]
        print("\n".join([*lost, f"{len(chosen) - len(lost)} of {len(chosen)} faults have their place"]))
        return bool(lost)
    bad = []
    with tempfile.TemporaryDirectory() as folder:
        tree, kernels = pathlib.Path(folder, "edgekv"), pathlib.Path(folder, "kernels")
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "site"))
        kernels.mkdir()
        for n, fault in chosen:
            began = time.monotonic()
            lost = misplaced(fault)
            found = f"not tested: {lost}" if lost else seed_and_test(fault, tree, kernels, options.python)
            print(f"{n:2}  {time.monotonic() - began:4.0f} s  {fault.what}: {found}", flush=True)
            if found != "caught":
                bad.append(n)
    print(f"{len(chosen) - len(bad)} of {len(chosen)} faults are caught" + (f"; not: {bad}" if bad else ""))
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
