"""The first minutes with edgekv, as a script that a newcomer could have typed."""

import os
import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).parent / "newcomer.sh"


def test_a_newcomer_arrives() -> None:
    """With the installed command; `tests/newcomer.sh --install` begins with `pip install .`."""
    path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", SCRIPT], capture_output=True, text=True, env=os.environ | {"PATH": path}, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "a newcomer arrives"
