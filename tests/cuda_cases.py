"""Devices for the tests of CUDA kernels, a GPU or a CPU in its place, and comparisons with the NumPy reference."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from cuda_host.driver import HostDriver
from helpers import SCHEMES
from kernel_cases import CODECS, C, assert_close, backend_module, blank

from edgekv.engine.cuda import CudaBackend, supports
from edgekv.engine.decoder import Decoder
from edgekv.engine.loading import SessionPlan, find_device
from edgekv.engine.model import Model
from edgekv.errors import ConfigError
from edgekv.kernels import reference
from edgekv.kernels.arrays import to_host
from edgekv.kernels.cuda.kernels import CudaKernels, read_values
from edgekv.kvcache import CacheSpec
from edgekv.weights.cuda import DeviceWeights

DEVICES = ["host", "gpu"]
ON_CUDA = [name for name, scheme in SCHEMES.items() if supports(CacheSpec(scheme, scheme.Config()))]


@dataclasses.dataclass
class OnDevice:
    """A driver, its kernels, and ways to bring arrays there."""

    driver: Any
    kernels: CudaKernels

    @classmethod
    def open(cls, name: str) -> OnDevice:
        """Opens the device of this name. Skips the test without a GPU, or without g++."""
        if name == "host":
            driver: Any = HostDriver()
        else:
            from edgekv.kernels.cuda.driver import Driver

            try:
                driver = Driver()
            except ConfigError as error:
                pytest.skip(f"needs a GPU ({error})")
        return cls(driver, CudaKernels(driver))

    def up(self, x: np.ndarray) -> Any:
        return self.driver.upload(x.copy())

    def encoded(self, here: C, there: C, *parts: tuple[np.ndarray, int]) -> C:
        """Encodes tokens at their places here and there, compares all arrays, and returns the host's codec."""
        blank(here), blank(there, self.kernels, self.driver)
        for x, place in parts:
            reference.encode(here, x, place)
            self.kernels.encode(there, self.up(x), place)
        self.check_arrays(here, there)
        return here

    def check_arrays(self, here: Any, there: Any) -> None:
        for name, array in here.arrays.items():
            np.testing.assert_array_equal(to_host(there.arrays[name]), array, err_msg=name)

    def check(self, name: str, *arguments: Any, tolerance: float = 2e-6, kind: str | None = None) -> list[Any]:
        """Calls a kernel here and in the reference, on copies, and compares every argument and result afterwards.

        int64 arguments are ranges and counts, which stay on the host. Floats may differ by `tolerance` of their
        largest, all else must be equal. kind: the kernel is one of its file. Returns the oracle's arguments.
        """
        expected = [x.copy() if isinstance(x, np.ndarray) else x for x in arguments]
        actual = [self.up(x) if isinstance(x, np.ndarray) and x.dtype != np.int64 else x for x in arguments]
        oracle, kernel = getattr(backend_module(reference, kind) if kind else reference, name), None
        if kind:
            file = importlib.import_module(CODECS[kind].backends["cuda"])
            kernel = functools.partial(getattr(file, name), self.kernels)
        results = oracle(*expected), (kernel or getattr(self.kernels, name))(*actual)
        for i, (a, b) in enumerate(zip([*expected, results[0]], [*actual, results[1]], strict=True)):
            if not isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
                continue
            if a.dtype == np.float32:
                assert_close(to_host(b), a, tolerance)
            else:
                np.testing.assert_array_equal(to_host(b), a, err_msg=f"{name}, argument {i}")
        return expected

    def twin(self, codec: Any) -> Any:
        """Returns a copy of the codec with its arrays on the device."""
        there = copy.copy(codec)
        for name, x in vars(codec).items():
            if isinstance(x, np.ndarray):
                setattr(there, name, self.up(x))
        there.arrays = {name: self.up(x) for name, x in codec.arrays.items()}
        if hasattr(codec, "store"):
            store = tuple(self.up(x) if isinstance(x, np.ndarray) else x for x in codec.store())
            there.store = lambda: store
        if hasattr(codec, "rotation"):
            there.rotation = copy.copy(codec.rotation)
            there.rotation.bind(next(iter(there.arrays.values())))
        return there

    def check_scores(self, codec: Any, q: np.ndarray, t0: int, t1: int, s: np.ndarray) -> None:
        """Compares scores that are written into a slice of s (G, M, columns) with the reference's."""
        expected, actual = s.copy(), self.up(s)
        reference.scores(codec, q, t0, t1, expected[:, :, 2 : 2 + t1 - t0])
        self.kernels.scores(self.twin(codec), self.up(q), t0, t1, actual[:, :, 2 : 2 + t1 - t0])
        assert_close(to_host(actual), expected)

    def check_sums(self, codec: Any, p: np.ndarray, t0: int, t1: int, out: np.ndarray) -> None:
        """Compares sums of values weighted by a slice of p (G, M, columns) with the reference's."""
        expected, actual = out.copy(), self.up(out)
        expected += codec.sums(p[:, :, 2 : 2 + t1 - t0], t0, t1)
        columns = self.up(p)[:, :, 2 : 2 + t1 - t0]
        self.kernels.launch_values(read_values(self.twin(codec)), columns, t0, t1, actual)
        assert_close(to_host(actual), expected)


def open_caches(decoder: Decoder, kv: str, capacity: int) -> list[Any]:
    caches = CacheSpec.parse(kv).layers(decoder.config, capacity)
    for cache in caches:
        cache.allocate(decoder.kernels, decoder.workspace)
    return caches


def require_same_logits(
    model: Model, tokens: Sequence[int], device: OnDevice, of_device: float | None = None
) -> None:
    """Compares logits of a prompt and a token behind it by NumPy, on the CPU and on CUDA.

    of_device: the error there, of the largest logit, where it has other weights; None: of its products alone.
    """
    form, n = model.weight_format("auto"), len(tokens)
    weights = DeviceWeights(model.store(form), device.driver, None)
    matrices = (a for w in weights.linears.values() for a in (w.data, w.scales, w.bias, w.corrections))
    others = *weights.vectors.values(), *(table for table, _ in weights.tables.values())
    planned = SessionPlan.make(model, device="cuda").weights_bytes
    assert sum(array.nbytes for array in (*matrices, *others) if array is not None) == weights.nbytes == planned
    cuda, rows = Decoder(CudaBackend(weights, device.driver, 1), n), []
    for each in (*(find_device(where).decoder(model, form, n, 1, None) for where in ("numpy", "cpu")), cuda):
        caches = open_caches(each, "dense:dtype=f32", n)
        prompt = to_host(each.head(each.prefill(each.embed(tokens[:-1], 0), caches)))
        rows.append(np.concatenate([prompt, to_host(each.step(tokens[-1], caches))[None]]))
    oracle, compiled, found = rows
    rounded = 0.01 * np.abs(oracle).max() if cuda.backend.driver.has_half_mma else 2e-4  # a prompt in halves
    most = rounded if of_device is None else of_device * np.abs(oracle).max()
    np.testing.assert_allclose(found, oracle, atol=most, rtol=0)
    error = np.linalg.norm(compiled - oracle) / np.linalg.norm(oracle)
    assert error < 0.06, error  # the products round the inputs to 8 bits; measured: 0.035 to 0.045


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> OnDevice:
    return OnDevice.open(request.param)
