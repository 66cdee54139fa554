"""Mixtures of experts: routing, quantized experts on every path, MXFP4, and what is read and refused."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import golden_cases
import numpy as np
import packed_cases
import pytest
from cuda_host.driver import HostDriver
from helpers import raises

from edgekv import Session
from edgekv.engine.cuda import CudaBackend
from edgekv.engine.model import Model
from edgekv.errors import CheckpointError, ConfigError
from edgekv.kernels.arrays import to_host
from edgekv.kernels.cpu import layers
from edgekv.models import architecture
from edgekv.models.config import ExpertsConfig
from edgekv.types import Threads
from edgekv.weights.cpu import CpuOps
from edgekv.weights.cuda import DeviceWeights
from edgekv.weights.formats import FORMATS, specs_bytes, store_specs
from edgekv.weights.ops import NumpyOps, choose, low_rank

WIDE = golden_cases.QWEN3_MOE | {"hidden_size": 128, "moe_intermediate_size": 256, "num_hidden_layers": 2}
PROMPT, TOKENS = 40, golden_cases.tokens("mixtral")


def logits_of(folder: pathlib.Path, device: str, weights: str) -> np.ndarray:
    """Returns logits of a prompt, whose tokens share experts, and of tokens one by one."""
    session = Session.load(folder, kv="dense:dtype=f32", weights=weights, device=device)
    prompt = session.logits(TOKENS[:PROMPT])
    return np.concatenate([prompt, *(session.logits([token]) for token in TOKENS[PROMPT:])])


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the median error over tokens; rounded inputs choose other experts for some."""
    return float(np.median(np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)))


@pytest.mark.parametrize(("name", "weights"), [("gpt-oss", "int4-32"), ("mixtral", "int8-32")])
def test_quantized_experts(name: str, weights: str, tmp_path: pathlib.Path) -> None:
    """The CPU path rounds inputs to 8 bits in blocks; the reference multiplies what the codes stand for."""
    folder = golden_cases.write_checkpoint(name, tmp_path / "model")
    error = relative(*(logits_of(folder, device, weights) for device in ("cpu", "numpy")))
    assert error < 0.12, error  # measured: 0.03 to 0.08, where rounding chooses other experts most


def test_experts_of_quantized_checkpoints(tmp_path: pathlib.Path) -> None:
    name = "gptq-v2-asymmetric"
    folders = packed_cases.write(name, tmp_path, WIDE)
    exact = [logits_of(folder, "numpy", "f32") for folder in folders]
    np.testing.assert_allclose(*exact, atol=2e-5, rtol=0)
    model = Model.open(folders[0])
    form = model.weight_format("auto")
    assert form.of("0.router").name == "f32"
    assert form.of("0.experts_up").name == packed_cases.MODELS[name][2]
    both = [logits_of(folders[0], device, "auto") for device in ("cpu", "numpy")]
    assert relative(*both) < 0.06, relative(*both)  # measured: 0.03 to 0.04


def test_the_bytes_of_a_token_are_those_of_its_experts(tmp_path: pathlib.Path) -> None:
    model = Model.open(golden_cases.write_checkpoint("qwen3-moe", tmp_path / "model"))
    form = model.weight_format("int4-32")
    store = model.store(form)
    specs = store_specs(store.arch, form, store.table_dtypes)
    idle = specs_bytes({key: spec for key, spec in specs.items() if ".experts_" in key}) * 5 // 8
    tables = specs_bytes({name: specs[name] for name in store.arch.tables()})
    assert (store.token_bytes, model.idle_bytes(form)) == (store.nbytes - tables - idle, idle)


def test_mxfp4_keeps_its_values(tmp_path: pathlib.Path) -> None:
    """Values stay in float32, in MXFP4 and in 8 bits; 4-bit whole numbers lose, and a note says so."""
    packed, plain = packed_cases.write_mxfp4(tmp_path)
    logits = [logits_of(folder, "numpy", "f32") for folder in (packed, plain)]
    np.testing.assert_allclose(*logits, atol=2e-5, rtol=0)
    model, reference = Model.open(packed), Model.open(plain)
    assert model.quantized == ("MXFP4",)
    own = model.weight_format("auto")
    assert [own.of(name).name for name in ("0.experts_up", "0.qkv", "0.router")] == ["fp4-32", "int8-32", "f32"]
    assert model.weights_note(own) is None
    for form in (own, model.weight_format("int8-32")):
        store = model.store(form)
        for name in ("0.experts_up", "2.experts_down"):
            np.testing.assert_array_equal(store.matrix(name), reference.weights.matrix(name))
    held = DeviceWeights(model.store(own), HostDriver(), None).linears[name]
    arrays, expected = {"codes": to_host(held.data), "scales": to_host(held.scales)}, store.matrix(name)
    decoded = FORMATS["int8-32"].dequantize(arrays, expected.shape[1])
    np.testing.assert_allclose(decoded, expected, atol=np.abs(expected).max() / 127)
    assert "MXFP4 were quantized a second time" in str(model.weights_note(model.weight_format("int4-32")))


def test_a_lora_of_experts_is_refused_beside_the_weights() -> None:
    arch = architecture(golden_cases.MIXTRAL)
    tensor = arch.linears()["1.experts_down"].parts[2].tensor
    with raises(CheckpointError, field="lora", match="changes experts"):
        low_rank(arch, {tensor: None})  # type: ignore[dict-item]


def test_cuda_refuses_them(tmp_path: pathlib.Path) -> None:
    model = Model.open(golden_cases.write_checkpoint("mixtral", tmp_path))
    with raises(ConfigError, field="device"):
        CudaBackend.decoder(model, model.weight_format("f32"), 8, 1, None)


def routed(logits: np.ndarray, k: int, renormalized: bool) -> tuple[list[list[int]], np.ndarray]:
    """Returns each token's experts in ascending order and the weights of all pairs, after NumPy's agree."""
    chosen, weights = choose(logits, ExpertsConfig((True,), logits.shape[1], k, 1, renormalized))
    order = np.argsort(chosen, axis=None, kind="stable")
    experts, tokens, own_weights = layers.route(logits, k, renormalized)
    np.testing.assert_array_equal(experts, chosen.reshape(-1)[order])
    np.testing.assert_array_equal(tokens, order // k)
    np.testing.assert_allclose(own_weights, weights.reshape(-1)[order], rtol=1e-6)
    return [experts[tokens == token].tolist() for token in range(len(logits))], own_weights


def test_the_chosen_and_their_weights() -> None:
    for n, count, k in ((1, 8, 2), (1, 128, 8), (5, 32, 4), (300, 24, 8), (3, 4, 4), (2, 1, 1)):
        logits = 3 * np.random.default_rng(count).standard_normal((n, count)).astype(np.float32)
        routed(logits, k, n % 2 == 0)
        routed(np.rint(logits), k, n % 2 == 1)  # many are equal


@pytest.mark.parametrize("renormalized", [False, True])
def test_equal_logits_and_such_that_are_no_numbers(renormalized: bool) -> None:
    nan, inf = np.nan, np.inf
    assert routed(np.array([[1, 2, 2, 1, 2]], np.float32), 2, renormalized)[0] == [[1, 2]]
    early_and_late = np.array([[nan, 5, 4], [5, 4, nan], [4, nan, 5], [nan, -inf, nan]], np.float32)
    with np.errstate(invalid="ignore"):  # -inf less -inf
        assert routed(early_and_late, 1, renormalized)[0] == [[1], [0], [2], [1]]
        assert routed(early_and_late, 2, renormalized)[0] == [[1, 2], [0, 1], [0, 2], [0, 1]]
        chosen, weights = routed(np.array([[nan] * 5, [inf, 0, nan, 3, 1]], np.float32), 2, renormalized)
    assert chosen == [[0, 1], [0, 3]]
    assert np.isnan(weights).all()


@pytest.mark.parametrize("channels", [1, 257])
def test_results_are_added_on_any_threads(channels: int, use_threads: Callable[[int], None]) -> None:
    rng = np.random.default_rng(channels)
    _, tokens, weights = layers.route(rng.standard_normal((7, 12)).astype(np.float32), 3, False)
    results = rng.standard_normal((21, channels)).astype(np.float32)
    x = rng.standard_normal((7, 2 * channels)).astype(np.float32)[:, channels:]
    meant = x.copy()
    for token, weight, result in zip(tokens, weights, results, strict=True):
        meant[token] += weight * result
    for n_threads in (1, 2, 3):
        use_threads(n_threads)
        np.testing.assert_array_equal(layers.add_results(x, results, tokens, weights), meant)


@pytest.fixture(params=["mixtral", "qwen3-moe", "gpt-oss"])
def model(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Model:
    return Model.open(golden_cases.write_checkpoint(request.param, tmp_path / "model"))


def drawn_for(model: Model) -> list[np.ndarray]:
    """Draws the residual stream of six tokens, and the experts' inputs."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((6, model.config.hidden_size)).astype(np.float32) for _ in range(2)]


def test_a_layer_of_experts(model: Model) -> None:
    store, (x, y) = model.store(model.weight_format("f32")), drawn_for(model)
    meant, out = (ops.add_experts(x, y, 1) for ops in (NumpyOps(store), CpuOps(store, Threads(1, 1))))
    error = np.linalg.norm(out - meant) / np.linalg.norm(meant - x)
    assert error < 1e-6, error  # measured: 2e-7


def test_a_token_has_the_same_bits_alone_as_with_others(model: Model) -> None:
    ops, inputs = CpuOps(model.store(model.weight_format("int4")), Threads(1, 1)), drawn_for(model)
    alone = [ops.add_experts(*(rows[i : i + 1] for rows in inputs), 1) for i in range(6)]
    np.testing.assert_array_equal(np.concatenate(alone), ops.add_experts(*inputs, 1))
