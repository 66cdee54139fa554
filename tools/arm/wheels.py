"""Checks that every dependency has a wheel for 64-bit Arm boards, at the lowest accepted versions and the newest.

    python tools/arm/wheels.py             needs uv (`pip install uv`) and a package index

Resolves pyproject.toml's dependencies for aarch64 Linux and each CPython, from wheels alone and for the oldest
glibc of SYSTEMS, and prints what was chosen and the glibc that it needs. Exits 1 where something has no such
wheel, and 77, with the reason, where uv or the index is missing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
# What boards run: glibc and CPython.
SYSTEMS = {
    "JetPack 6 (Ubuntu 22.04)": ((2, 35), "3.10"),
    "Raspberry Pi OS bookworm": ((2, 36), "3.11"),
    "Raspberry Pi OS trixie": ((2, 41), "3.13"),
}
OLDEST = min(glibc for glibc, _ in SYSTEMS.values())
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
RESOLUTIONS = {"lowest": "lowest-direct", "newest": "highest"}
SHOWN = ("numpy", "numba", "llvmlite", "tokenizers")
SKIPPED = 77
OFFLINE = re.compile(r"error sending request|failed to fetch|dns error|client error \(connect\)", re.IGNORECASE)
WHEEL = re.compile(r'url = "[^"]*/([^"/]+\.whl)"[^}]*?size = (\d+)')
GLIBC = re.compile(r"manylinux_(\d+)_(\d+)_aarch64")
LEGACY = {"manylinux2014_aarch64": (2, 17)}


@dataclasses.dataclass(frozen=True)
class Resolved:
    """Versions and the oldest sufficient glibc by package, the bytes of all wheels, or the reason for failure."""

    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    glibc: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    n_bytes: int = 0
    failure: str = ""


def resolve(python: str, resolution: str) -> Resolved:
    """Returns what uv chooses for a board, from wheels alone."""
    with tempfile.TemporaryDirectory() as folder:
        lock = pathlib.Path(folder) / "pylock.toml"
        command = [uv(), "pip", "compile", "--quiet", "--no-config", "--no-python-downloads"]
        command += ["--python-platform", f"aarch64-manylinux_{OLDEST[0]}_{OLDEST[1]}", "--python-version", python]
        command += ["--only-binary", ":all:", "--resolution", RESOLUTIONS[resolution], "--format", "pylock.toml"]
        command += ["--output-file", str(lock), str(ROOT / "pyproject.toml")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return Resolved(failure=done.stderr.strip())
        return read_lock(lock.read_text(encoding="utf-8"))


def read_lock(text: str) -> Resolved:
    """Reads a pylock.toml. A package without any wheel for Linux on Arm is a failure that names it."""
    versions, glibcs, total = {}, {}, 0
    for part in text.split("[[packages]]")[1:]:
        name, version = (re.search(rf'^{key} = "([^"]+)"', part, re.MULTILINE) for key in ("name", "version"))
        if not name or not version:
            return Resolved(failure=f"no name and version in: {part.strip()[:80]}")
        fits = [
            (needed, int(size)) for file, size in WHEEL.findall(part) if (needed := glibc_of(file)) is not None
        ]
        if not fits:
            return Resolved(failure=f"{name[1]} {version[1]} has no wheel for aarch64")
        versions[name[1]] = version[1]
        glibcs[name[1]], size = min(fits)
        total += size
    return Resolved(versions, glibcs, total)


def glibc_of(wheel: str) -> tuple[int, int] | None:
    """Returns the oldest glibc that a wheel's tags accept: (0, 0) for any machine, None for others."""
    platforms = wheel.removesuffix(".whl").split("-")[-1].split(".")
    if "any" in platforms:
        return 0, 0
    found = [LEGACY[name] for name in platforms if name in LEGACY]
    found += [(int(match[1]), int(match[2])) for name in platforms if (match := GLIBC.fullmatch(name))]
    return min(found, default=None)


def uv() -> str:
    """Returns the command uv beside this Python, or on the path."""
    beside = pathlib.Path(sys.executable).with_name("uv")
    program = str(beside) if beside.exists() else shutil.which("uv")
    if program is None:
        print("skipped: uv is missing (pip install uv)")
        sys.exit(SKIPPED)
    return program


def line(python: str, resolution: str, found: Resolved) -> str:
    shown = "  ".join(f"{name} {found.versions.get(name, '-')}" for name in SHOWN)
    most = max(found.glibc.values())
    systems = [name for name, (glibc, its) in SYSTEMS.items() if its == python and glibc >= most]
    size = f"{len(found.versions)} wheels, {found.n_bytes / 1e6:.0f} MB, glibc {most[0]}.{most[1]}"
    return f"CPython {python}  {resolution}  {shown}  ({size})" + (f"  {systems[0]}" if systems else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", choices=PYTHONS, help="by default all")
    arguments = parser.parse_args()
    os.environ.setdefault("UV_HTTP_TIMEOUT", "20")
    uv()
    asked = [(python, resolution) for python in arguments.python or PYTHONS for resolution in RESOLUTIONS]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda pair: resolve(*pair), asked))
    offline = next((found.failure for found in results if OFFLINE.search(found.failure)), None)
    if offline:
        print(f"skipped: the package index cannot be reached: {offline.splitlines()[-1].strip()}")
        sys.exit(SKIPPED)
    for (python, resolution), found in zip(asked, results, strict=True):
        failed = f"CPython {python}  {resolution}  FAILED: {found.failure}"
        print(failed if found.failure else line(python, resolution, found))
    sys.exit(any(found.failure for found in results))


if __name__ == "__main__":
    main()
