"""Refusals of `--device cuda`: no CuPy, no GPU, no kernels, a kernel that does not compile."""

from __future__ import annotations

import pathlib
import pkgutil
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import golden_cases
import numpy as np
import pytest
from cuda_cases import ON_CUDA
from gguf_writer import write_k_quants
from helpers import SCHEMES, raises

import edgekv
from edgekv.checkpoint.hub import shipped_model
from edgekv.engine.cuda import CudaBackend
from edgekv.engine.loading import SessionPlan, find_device, resolve_device
from edgekv.engine.model import Model
from edgekv.engine.session import Session
from edgekv.errors import CacheError, ConfigError, MemoryBudgetError
from edgekv.kernels.cuda import driver as cupy_driver
from edgekv.kernels.cuda.driver import Launch, Program
from edgekv.kvcache import CacheSpec
from edgekv.models import architecture


class FakeError(RuntimeError):
    """An error in place of CuPy's own."""


def fake_cupy(zeros: Any = np.zeros, nvrtc: Any = lambda: (12, 9)) -> Any:
    """Returns the module as far as a driver touches it before its first launch."""
    runtime = SimpleNamespace(getDeviceCount=lambda: 1, getDevice=lambda: 0, runtimeGetVersion=lambda: 12090)
    properties = {"multiProcessorCount": 1, "totalGlobalMem": 1 << 30, "major": 8, "minor": 7}
    runtime.getDeviceProperties, runtime.memGetInfo = lambda device: properties, lambda: (1 << 30, 4 << 30)
    stream = type("Stream", (), {"null": None, "__init__": lambda self, non_blocking: None})
    compiler, compiles = SimpleNamespace(CompileException=FakeError), SimpleNamespace(getVersion=nvrtc)
    cuda = SimpleNamespace(runtime=runtime, Stream=stream, compiler=compiler, nvrtc=compiles)
    return SimpleNamespace(cuda=cuda, zeros=zeros, RawModule=None)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A CuPy that is installed, with a device of 1 GiB."""
    monkeypatch.setitem(sys.modules, "cupy", made := fake_cupy())
    return made


def failing(message: str) -> mock.Mock:
    return mock.Mock(side_effect=FakeError(message))


def test_no_module_of_edgekv_imports_cupy() -> None:
    modules = pkgutil.walk_packages(edgekv.__path__, "edgekv.")
    names = [each.name for each in modules if "__main__" not in each.name]
    code = f"import sys, {', '.join(names)}; sys.exit('cupy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("cupy", "said"),
    [
        (None, ("pip install 'edgekv[cuda12]'",)),
        (fake_cupy(failing("cudaErrorInsufficientDriver")), ("CUDA 12.9", "cudaErrorIns", "NVIDIA driver")),
        (fake_cupy(nvrtc=failing("no libnvrtc.so.12")), ("libnvrtc.so.12", "pip install 'edgekv[cuda12]'")),
    ],
    ids=["CuPy", "driver", "compiler"],
)
def test_what_is_missing_is_named(cupy: Any, said: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with raises(ConfigError, *said, "device='cpu'"):
        CudaBackend.require(CacheSpec.parse("dense"))
    assert resolve_device("auto", CacheSpec.parse("dense")) == "cpu"


def test_too_little_device_memory_is_found_before_loading(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy.cuda.runtime.memGetInfo = lambda: (1 << 20, 4 << 30)
    monkeypatch.setattr(CudaBackend, "decoder", lambda *arguments: pytest.fail("began to load"))
    with raises(MemoryBudgetError, "needs ", "weights ", "kv cache ", "1.0 MiB is available", "`ctx`"):
        Session.load(shipped_model("demo"), device="cuda")


def test_blocks_of_a_gguf_file_take_more_there(cupy: Any, monkeypatch: Any, tmp_path: pathlib.Path) -> None:
    """Q2_K's 2.6 bits for a weight are 9 there, 8 and a scale: the GPU has room for the former alone."""
    path, loads = write_k_quants(tmp_path, "Q2_K")[0], dict[str, Any](kv="f16", ctx=8)
    monkeypatch.setattr(CudaBackend, "decoder", lambda *arguments: pytest.fail("began to load"))
    free = sum(SessionPlan.make(Model.open(path), **loads).parts().values())
    cupy.cuda.runtime.memGetInfo = lambda: (free, 4 << 30)
    with pytest.raises(MemoryBudgetError, match="weights"):
        Session.load(path, device="cuda", **loads)


@pytest.mark.parametrize("name", sorted(set(SCHEMES) - set(ON_CUDA)))
def test_schemes_without_kernels_are_refused(name: str) -> None:
    with raises(CacheError, f"kv={name!r}", *ON_CUDA) as error:
        CudaBackend.require(CacheSpec.parse(name))
    assert (error.value.field, error.value.accepted) == ("kv", tuple(ON_CUDA))
    assert resolve_device("auto", CacheSpec.parse(name)) == "cpu"


@pytest.mark.usefixtures("cupy")
def test_auto_is_the_gpu_where_there_is_one() -> None:
    assert resolve_device("auto", CacheSpec.parse("dense")) == "cuda"
    assert resolve_device("cpu", CacheSpec.parse("dense")) == "cpu"
    for family, device in (("llama1", "cuda"), ("mixtral", "cpu"), ("lfm2", "cpu")):
        config = architecture(golden_cases.CASES[family]).config
        assert resolve_device("auto", CacheSpec.parse("dense"), config) == device
    assert find_device("cuda").free_bytes() == 1 << 30
    with pytest.raises(ConfigError, match="accepted: auto, cpu, numpy, cuda"):
        find_device("tpu")


def test_launches_that_fail(cupy: Any) -> None:
    """The log of a kernel that does not compile is kept; too little memory is a MemoryError."""
    cupy.RawModule = failing("layers.cu(3): error: what is this?\n1 error detected")
    driver, log = cupy_driver.Driver(), cupy_driver.cache_root() / "cuda-compile.log"
    with raises(ConfigError, "layers.cu", log, "device='cpu'"):
        driver.launch(Launch(Program(("layers",)), "softmax", (1,), 256))
    assert "what is this?" in log.read_text()
    for text, kind in (("CUDA_ERROR_OUT_OF_MEMORY", MemoryError), ("CUDA_ERROR_INVALID_VALUE", RuntimeError)):
        cupy.RawModule = mock.Mock(**{"return_value.get_function.return_value": failing(f"{text}: no")})
        with pytest.raises(kind, match=text):
            cupy_driver.Driver().launch(Launch(Program(("layers",)), "softmax", (1,), 256))
