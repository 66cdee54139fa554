"""Print the families' table of docs/models.md: the largest error of logits against transformers' (tests/golden).

usage: python tools/golden_errors.py
"""

from __future__ import annotations

import pathlib
import sys
import tempfile

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import golden_cases  # noqa: E402

from edgekv import Session  # noqa: E402


def errors(name: str) -> list[float]:
    """Of one case on the reference and on the CPU path."""
    golden = np.load(ROOT / "tests" / "golden" / "logits.npz")[name]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = golden_cases.write_checkpoint(name, pathlib.Path(folder) / "model")
        for device in ("numpy", "cpu"):
            session = Session.load(path, kv="dense:dtype=f32", weights="f32", device=device)
            found.append(float(np.abs(session.logits(golden_cases.tokens(name))[::3] - golden).max()))
    return found


def main() -> None:
    families: dict[str, list[str]] = {}
    for name, config in golden_cases.CASES.items():
        families.setdefault(config["model_type"], []).append(name)
    print("| `model_type` | cases | largest error, reference | largest error, CPU |\n|---|---|---|---|")
    for family, names in sorted(families.items()):
        reference, cpu = (max(each) for each in zip(*map(errors, names), strict=True))
        print(f"| `{family}` | {', '.join(names)} | {reference:.1e} | {cpu:.1e} |")


if __name__ == "__main__":
    main()
