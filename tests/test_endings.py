"""The program's end when its environment fails: closed or full output, signals, forks, a read-only install."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
from unittest import mock

import golden_cases
import pytest

import edgekv
from edgekv import EdgeKVError, Session
from edgekv.kernels import kernel_cache

RUN = [sys.executable, "-m", "edgekv", "run", "--prompt", "It was a dark night"]


def test_closed_and_full_output() -> None:
    """No traceback; with a full disk a line and status 2."""
    whole = [*RUN, "--max-new-tokens", "2"]
    shell = ["sh", "-c", 'exec "$@" >&-', "sh"]
    closed = subprocess.run([*shell, *whole], capture_output=True, text=True, timeout=120)
    assert closed.returncode == 0
    assert "Traceback" not in closed.stderr
    with open("/dev/full", "w") as full:
        done = subprocess.run(whole, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("edgekv: error: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_run_with_report_and_session(tmp_path: pathlib.Path, number: int, status: int) -> None:
    session = tmp_path / "session"
    command = [*RUN, "--max-new-tokens", "8000", "--session", str(session), "--json", str(tmp_path / "report")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(20)  # it writes text
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == status
    assert b"interrupted" in said
    assert b"Traceback" not in said
    assert (tmp_path / "report").exists()
    assert Session.restore(session, "models/demo").tokens


def test_ctrl_c_during_imports() -> None:
    """Once llvmlite has been imported, which Python tells, and others are still to come.

    Python itself answers a Ctrl-C that comes before any of ours.
    """
    command = [RUN[0], "-X", "importtime", *RUN[1:], "--max-new-tokens", "8000"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert any(line.split()[-1:] == ["llvmlite"] for line in process.stderr)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "Traceback" not in said


def test_a_forked_child_refuses_to_generate(tmp_path: pathlib.Path) -> None:
    """It would wait for ever for threads that are not there."""
    session = Session.load(golden_cases.write_checkpoint("llama1", tmp_path), weights="f32")
    session.prefill([1, 2, 3])
    child = os.fork()
    if not child:
        code = 1
        try:
            session.prefill([4, 5])
        except EdgeKVError as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    session.prefill([4, 5])


def test_kernels_are_kept_for_this_user_alone(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is given, that of the caches, a temporary one: the first that nobody else can write to."""
    given, home = tmp_path / "given", tmp_path / "home"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(given))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def keep() -> pathlib.Path | None:
        kernel_cache._root.cache_clear()
        found = kernel_cache.folder.__wrapped__()
        return found and found.parent

    assert keep() == given
    given.chmod(0o775)
    assert keep() == home / "edgekv" / "kernels"
    assert [path.stat().st_mode & 0o777 for path in (home / "edgekv").rglob("*")] == [0o700, 0o700]
    (home / "edgekv" / "kernels").chmod(0o777)
    assert keep() == tmp_path / f"edgekv-numba-{os.getuid()}"
    monkeypatch.setattr(os, "getuid", lambda: 12345)  # all of them are somebody else's
    assert keep() is None
    monkeypatch.undo()
    kernel_cache._root.cache_clear()


def test_a_kernel_that_can_not_be_saved_leaves_nothing(tmp_path: pathlib.Path) -> None:
    with mock.patch("pathlib.Path.replace", side_effect=OSError):
        kernel_cache.save(tmp_path / "kernel", "symbol", b"code")
    assert [path.name for path in tmp_path.iterdir()] == [kernel_cache.SOURCES_FILE]


NOWHERE = """
from unittest import mock
from edgekv.kernels import kernel_cache
with mock.patch("pathlib.Path.mkdir", side_effect=PermissionError):
    assert kernel_cache.folder() is None
import numpy as np
from edgekv.weights.formats import FORMATS
codes = FORMATS["int8-32"].quantize(np.arange(64, dtype=np.float32).reshape(4, 16))["codes"]
from edgekv.codecs.f16.cpu import KERNELS
assert KERNELS["f16"].put.address
print(codes.any())
"""


def test_kernels_run_where_they_cannot_be_kept() -> None:
    done = subprocess.run([sys.executable, "-c", NOWHERE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True"


ROUND_UP = """
import numpy as np
from edgekv.kernels import kernel_cache
from edgekv.kernels.cpu.loops import Loop, address_of, floats, halves
from edgekv.kernels.cpu.scalar import get, put, round_up_to_half

@Loop
def rounded(x, out):
    put(halves(out), 0, round_up_to_half(get(floats(x), 0)))

out = np.zeros(1, np.uint16)
rounded.call(address_of(np.ones(1, np.float32)), address_of(out))
print(out[0], int(kernel_cache.compile_seconds() == 0))
"""


def test_kernels_are_kept_apart_and_compiled_anew_when_what_they_call_has_changed(tmp_path: pathlib.Path) -> None:
    """Neither beside the sources nor where a file beside a model says; an upgrade can leave indices of before."""
    home = pathlib.Path(edgekv.__file__).parent
    package = shutil.copytree(home, tmp_path / "edgekv", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "round_up.py").write_text(ROUND_UP)
    (tmp_path / "model").mkdir()
    numba_config = "cache_dir: here\ncache_locator_classes: a\ndisable_jit: 1\n"
    (tmp_path / "model" / ".numba_config.yaml").write_text(numba_config)
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "home"), "NUMBA_CACHE_DIR": ""}

    def rounded() -> list[str]:
        command, where = [sys.executable, "-B", "../round_up.py"], tmp_path / "model"
        done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.split()

    one, largest = "15360", "31743"  # bits of float16
    assert [rounded(), rounded()] == [[one, "0"], [one, "1"]]  # the second finds what the first has kept
    saved = {path.relative_to(tmp_path).parts[:3] for path in tmp_path.rglob("*rounded-*")}
    assert saved == {("home", "edgekv", "kernels")}
    helper = package / "kernels" / "cpu" / "scalar.py"
    helper.write_text(helper.read_text().replace('_select("<")', '_select(">")'))
    assert [rounded(), rounded()] == [[largest, "0"], [largest, "1"]]
