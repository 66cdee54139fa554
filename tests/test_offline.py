"""edgekv talks to nobody and writes nothing outside its own cache folder."""

import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
from PIL import Image

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINGER = """\
import atexit, sys, time
from edgekv.cli import main
atexit.register(time.sleep, 6)  # telemetry is sent some seconds after the work is done
sys.exit(main())
"""


def watched(folder: pathlib.Path, script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs the script with a fresh home, `folder/home`; killed when it opens a socket of the internet."""
    home = folder / "home"
    home.mkdir()
    (folder / "script.py").write_text(script)
    kept = ("PATH", "LD_LIBRARY_PATH", "NUMBA_CACHE_DIR")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment |= {"HOME": str(home), "TMPDIR": str(home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "tests" / "no_network.py", folder / "script.py", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=home)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    return done


def test_the_filter_kills(tmp_path: pathlib.Path) -> None:
    assert watched(tmp_path, "import socket; socket.socket()").returncode == -signal.SIGSYS


def test_run_opens_no_socket_and_writes_to_its_cache_alone(tmp_path: pathlib.Path) -> None:
    Image.new("RGB", (128, 128), "red").save(tmp_path / "scene.png")
    given = "--model", "scenes", "--image", tmp_path / "scene.png", "--prompt", "It was", "--max-new-tokens", 4
    done = watched(tmp_path, LINGER, "run", *given)
    assert done.returncode == 0, done.stderr
    home = tmp_path / "home"
    written = [path for path in home.rglob("*") if path.is_file()]
    assert not [path for path in written if not path.is_relative_to(home / ".cache" / "edgekv")]


def test_onnxruntime_is_imported_in_one_place() -> None:
    """The module that turns its telemetry off first."""
    files = [path for folder in ("edgekv", "tools", "examples") for path in (ROOT / folder).rglob("*.py")]
    imports = re.compile(r"^\s*(import|from) onnxruntime", re.MULTILINE)
    found = {str(path.relative_to(ROOT)) for path in files if imports.search(path.read_text())}
    assert found == {"edgekv/vision/model.py"}


def test_a_caller_cannot_turn_telemetry_on_by_accident(tmp_path: pathlib.Path) -> None:
    use = "from edgekv.vision.model import onnxruntime; onnxruntime()"
    code = f"{use}; import os; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    environment = os.environ | {"ORT_DISABLE_TELEMETRY": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == "1\n"
