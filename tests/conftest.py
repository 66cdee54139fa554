"""Fixtures of all tests: the optional material folder and a cache folder of the run."""

import os
import pathlib
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import golden_cases
import pytest
from cuda_cases import device  # noqa: F401
from helpers import HAS_PAPERS, Cli
from kernel_cases import use_threads, way  # noqa: F401
from serving import Server

from edgekv import Session
from edgekv.cli import main
from edgekv.files import cache_root
from edgekv.kvcache import registry

if TYPE_CHECKING:
    import openai

# In a shell's background job Ctrl-C is ignored, and would be by the programs that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the Hub for a mistyped path
# What is compiled stays, see `private_cache`.
os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_root() / "kernels"))

# A copy without the papers: files that import one are left out, and a test that names a paper's scheme skips.
if not HAS_PAPERS:
    files = pathlib.Path(__file__).parent.glob("test_*.py")
    theirs = "\nfrom edgekv.papers", "\nimport test_cuda_attend"
    collect_ignore = [file.name for file in files if any(each in file.read_text() for each in theirs)]
    registry._unknown = lambda name: pytest.skip(f"{name} needs the papers", allow_module_level=True)

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Runs several test files in two processes where pytest-xdist is installed; ``-n 0`` keeps them in one."""
    option, several = config.option, len(config.args) > 1 or ".py" not in config.args[0]
    is_unsaid = getattr(option, "numprocesses", 0) is None and option.capture != "no" and not option.usepdb
    if is_unsaid and several and "PYTEST_XDIST_WORKER" not in os.environ:
        option.numprocesses, option.dist, option.loadscopereorder = 2, "loadfile", False


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
    """The folder of test material beside the checkout. Tests that need it skip without it."""
    path = pathlib.Path(os.environ.get("EDGEKV_SHARED", ROOT.parent / "shared"))
    if not path.is_dir():
        pytest.skip(f"needs the test material in {path} (or EDGEKV_SHARED)")
    return path


@pytest.fixture(autouse=True, scope="session")
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Sends the quantized stores that tests make to a temporary folder of the whole run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "xdg"))
        yield


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command here and returns what it printed, (out, err).

    status 2: that is nothing but an error of one line, behind so many lines of notes.
    """

    def run(*arguments: object, status: int = 0, notes: int = 0) -> Any:
        capsys.readouterr()
        assert main(list(map(str, arguments))) == status
        said = capsys.readouterr()
        if status == 2:
            *before, error = said.err.splitlines()
            assert (said.out, len(before), error[:15]) == ("", notes, "edgekv: error: "), said.err
        return said

    return run


@pytest.fixture(scope="session")
def stories(shared: pathlib.Path) -> pathlib.Path:
    """A trained model of 260,000 weights."""
    return shared / "models" / "stories260K"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A checkpoint of a small Llama 3.1 with random weights."""
    return golden_cases.write_checkpoint("llama31", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def demo() -> Iterator[Session]:
    """A session of the model that ships, to be forked or reset."""
    with Session.load("demo", ctx=1024) as session:
        yield session


@pytest.fixture(scope="module")
def client(server: Server) -> "Iterator[openai.OpenAI]":
    """OpenAI's own client of a module's ``server``."""
    import openai  # takes a second

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
