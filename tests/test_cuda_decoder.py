"""Whole models and their caches on the CUDA path: logits, captured steps, sampling, and greedy text."""

from __future__ import annotations

import pathlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import golden_cases
import numpy as np
import pytest
from cache_cases import Heads, draw, make, read_prompt
from cuda_cases import ON_CUDA, OnDevice, open_caches
from cuda_host.driver import HostDriver
from helpers import SCHEMES, text
from kernel_cases import assert_close, pairs

from edgekv import Session
from edgekv.checkpoint.hub import shipped_model
from edgekv.engine import cuda as cuda_decoder
from edgekv.engine.cuda import MIN_REPLAYS, CudaBackend
from edgekv.engine.decoder import Backend, Decoder
from edgekv.engine.loading import find_device
from edgekv.engine.model import Model
from edgekv.engine.runner import Runner, State
from edgekv.engine.sampling import Sampler, SamplingParams
from edgekv.engine.scheduler import SerialScheduler
from edgekv.engine.session import choose_token
from edgekv.errors import EdgeKVError, MemoryBudgetError, SessionError
from edgekv.eval.evaluate import evaluate
from edgekv.kernels.arrays import to_host
from edgekv.kernels.cuda.driver import CaptureError
from edgekv.kvcache import CacheSpec, registry
from edgekv.kvcache.cache import KVCache, rewind
from edgekv.kvcache.policies import RollingCache, Sizes
from edgekv.weights import gaussian
from edgekv.weights.cuda import CudaOps, DeviceWeights

LOGIT_ERROR = 1e-2  # of the largest logit; measured: 6.5e-3 of gemma2, 3.1e-3 of the others
GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "logits.npz")
CAPACITY, LONG, PROMPT = 48, 160, 60
ON_HOST = (("onebit:residual_length=8", None), ("kivi2:residual_length=8", 90))
SMALL = golden_cases.LLAMA | {"model_type": "mistral", "head_dim": 64, "max_position_embeddings": 200}
SMALL |= {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1}


def decoder(model: Model, place: OnDevice, weights: str = "f32", capacity: int = CAPACITY) -> Decoder:
    store = model.store(model.weight_format(weights))
    return Decoder(CudaBackend(DeviceWeights(store, place.driver, None), place.driver, 1), capacity)


def let_replay(monkeypatch: pytest.MonkeyPatch, replays: bool) -> None:
    monkeypatch.setattr(Decoder, "can_replay", property(lambda decoder: replays))
    if not replays:  # caches store the tokens, too
        monkeypatch.setattr(CudaBackend, "reserve_row", Backend.reserve_row)


def small_model(monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path, window: int | None = None) -> Model:
    monkeypatch.setitem(golden_cases.CASES, "small", SMALL | {"sliding_window": window})
    return Model.open(golden_cases.write_checkpoint("small", folder / "model"))


REPLAYED = ["llama2-gqa", "mistral", "qwen3", "gpt2", "gemma3-options", "gemma2-options"]
ON_HOST_TOO = ["qwen3", "gpt2", "gemma3-options", "phi3-longrope"]
STEPPED = ["phi3-longrope"]  # changes with the length


@pytest.mark.parametrize("name", REPLAYED + STEPPED)
def test_logits_of_prompts_and_of_steps(device: OnDevice, name: str, tmp_path: pathlib.Path) -> None:
    """A prompt's are transformers'; those of two pieces and single tokens, most of them replayed, are NumPy's."""
    if isinstance(device.driver, HostDriver) and name not in ON_HOST_TOO:
        pytest.skip("seconds each without a GPU")
    model = Model.open(golden_cases.write_checkpoint(name, tmp_path / "model"))
    cuda, tokens = decoder(model, device), golden_cases.tokens(name)
    caches = open_caches(cuda, "dense:dtype=f32", CAPACITY)
    whole = to_host(cuda.head(cuda.prefill(cuda.embed(tokens, 0), caches)))
    np.testing.assert_allclose(whole[::3], GOLDEN[name], atol=2e-4, rtol=0)
    rows = []
    for each in (cuda, find_device("numpy").decoder(model, model.weight_format("f32"), CAPACITY, 1, None)):
        caches = open_caches(each, "dense:dtype=f32", CAPACITY)
        parts = [each.prefill(each.embed(tokens[a:b], a), caches) for a, b in ((0, 17), (17, 28))]
        logits = [to_host(each.head(x)) for x in parts]
        rows.append([*logits, *(to_host(each.step(token, caches))[None].copy() for token in tokens[28:])])
    np.testing.assert_allclose(*(np.concatenate(each) for each in rows), atol=2e-4, rtol=0)
    assert cuda.graph_runner.n_replayed == (19 if name in REPLAYED else 0)


def test_schemes_run_before_capture(device: OnDevice, tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    """Also where all layers slide, whose caches are of one class."""
    model, replayed = small_model(monkeypatch, tmp_path, 20), []
    cuda = decoder(model, device, capacity=LONG)
    for scheme in ("dense", "kivi2:residual_length=32"):
        caches = open_caches(cuda, scheme, LONG)
        cuda.prefill(cuda.embed(np.arange(9), 0), caches)
        for token in range(3):
            cuda.step(token, caches)
        replayed.append(cuda.graph_runner.n_replayed)
        assert {type(cache) for cache in caches} == {RollingCache}
        assert rewind(caches, 0) == 0
        cuda.prefill(cuda.embed(np.arange(12), 0), caches)  # of as many tokens as there were
        with mock.patch.object(device.driver, "capture", wraps=device.driver.capture) as capture:
            cuda.step(0, caches)
        capture.assert_called_once()  # the prompt may have replaced arrays
    assert replayed == [2, 5]


TWICE = {"append": lambda self, keys, values: super(type(self), self).append(keys, 2 * values)}
OFTEN = {"exact_sizes": lambda self, _: Sizes(sink=0, residual_length=16, block=32)}
OFTEN["needs_flush"] = lambda self: self.n_recent >= 48 - 16 * self.geometry.layer
BY_LAYER = {"exact_sizes": lambda self, _: Sizes(sink=0, residual_length=16 - 16 * self.geometry.layer, block=32)}


@pytest.mark.parametrize(("name", "own"), [("dense", TWICE), *(("kivi2", x) for x in (TWICE, BY_LAYER, OFTEN))])
def test_a_package_changes_a_scheme(
    name: str, own: Any, tmp_path: pathlib.Path, device: OnDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's rotation stores tokens, and layers are counted together, only where the scheme does the same."""
    monkeypatch.setitem(SMALL, "num_hidden_layers", 2)
    model, rows = small_model(monkeypatch, tmp_path), []
    monkeypatch.setitem(registry.CACHES, name, type("Own", (SCHEMES[name],), own))
    here = find_device("numpy").decoder(model, model.weight_format("f32"), CAPACITY, 1, None)
    for each in (here, decoder(model, device)):
        caches = open_caches(each, name, CAPACITY)
        each.prefill(each.embed(np.arange(9), 0), caches)
        rows.append(np.stack([to_host(each.step(token, caches)).copy() for token in range(31)]))
    np.testing.assert_allclose(*rows, atol=5e-3, rtol=0)


def test_graphs_of_packing_outlast_those_of_steps(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a step packs just when its graph has to be captured anew."""
    device, n_captures = OnDevice.open("host"), [0]
    monkeypatch.setattr(HostDriver, "launch", lambda *_: None)  # the order of captures and steps is all
    cuda = decoder(small_model(monkeypatch, tmp_path), device, capacity=300)
    caches = open_caches(cuda, "onebit:residual_length=8", 300)
    with mock.patch.object(device.driver, "capture", wraps=device.driver.capture) as capture:
        for stop, graph_tokens in ((140, 62), (220, 512)):
            monkeypatch.setattr(cuda_decoder, "GRAPH_TOKENS", graph_tokens)
            n_captures += [(cuda.step(0, caches), capture.call_count)[1] for _ in range(caches[0].n_seen, stop)]
    assert np.diff(n_captures).nonzero()[0].tolist() == [4, 67, 75, 76, 140]  # packed after 75, 139 and 203


@pytest.mark.parametrize(
    ("weights", "is_tiled"),
    [("int8", False), ("int4", True), ("int4-32", False), ("int4-32", True), ("q3", False), ("q4", True)],
)
def test_quantized_weights(device: OnDevice, weights: str, is_tiled: bool, tmp_path: pathlib.Path) -> None:
    """A prompt goes through cuBLAS, a step through the codes: both are what the store's codes stand for."""
    device.driver.has_half_gemm = False  # before sm_70
    if is_tiled and not device.driver.has_integer_mma:
        pytest.skip("needs sm_80 or later")
    device.driver.has_integer_mma = is_tiled
    model = Model.open(golden_cases.write_checkpoint("llama-biases", tmp_path / "model"))
    form, tokens = model.weight_format(weights), golden_cases.tokens("llama-biases")
    results = []
    for each in (find_device("numpy").decoder(model, form, CAPACITY, 1, None), decoder(model, device, weights)):
        caches = open_caches(each, "dense:dtype=f32", CAPACITY)
        hidden = each.prefill(each.embed(tokens[:20], 0), caches)
        steps = [to_host(each.step(token, caches)).copy() for token in tokens[20:23]]
        results.append(np.stack([to_host(each.head(hidden[-1:]))[0], *steps]))
    error = 1e-3 if is_tiled else 2e-4  # activations of 16 bits
    np.testing.assert_allclose(results[1], results[0], atol=error, rtol=0)


@pytest.mark.parametrize(
    ("text", "n_eager"),
    [
        ("h1b", 1),
        ("onebit:residual_length=8", 2),  # the first step, and that with the first packed token
        ("kivi2:residual_length=8", 1),
        ("planes:residual_length=8,sink=2", 2),
        ("kvcomp:residual_length=8", 99),
    ],
)
@pytest.mark.parametrize("window", [None, 90])
def test_replayed_steps_equal_steps(
    window: int | None, text: str, n_eager: int, tmp_path: pathlib.Path, device: OnDevice, monkeypatch: Any
) -> None:
    """Kernels run with the counters of the captured step and how far they moved; blocks are packed between."""
    if isinstance(device.driver, HostDriver) and (text, window) not in ON_HOST:
        pytest.skip("minutes without a GPU")
    model = small_model(monkeypatch, tmp_path, window)
    tokens, rows = np.random.default_rng(0).integers(0, golden_cases.VOCAB, LONG), []
    for replays in (True, False):
        cuda = decoder(model, device, capacity=LONG)
        let_replay(monkeypatch, replays)
        caches = open_caches(cuda, text, LONG)
        cuda.prefill(cuda.embed(tokens[:PROMPT], 0), caches)
        rows.append(np.stack([to_host(cuda.step(token, caches)).copy() for token in tokens[PROMPT:]]))
        most = LONG - PROMPT - MIN_REPLAYS  # the last ones are not worth it
        assert (most - n_eager <= cuda.graph_runner.n_replayed) if replays else not cuda.graph_runner.n_replayed
    np.testing.assert_allclose(rows[0], rows[1], atol=1e-5, rtol=0)


def test_a_capture_that_fails_is_a_step(
    tmp_path: pathlib.Path, device: OnDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload by a second text, or an allocation that fails, ends a capture and not the text."""
    model, rows = small_model(monkeypatch, tmp_path), []
    for replays in (True, False):
        cuda = decoder(model, device, capacity=LONG)
        let_replay(monkeypatch, replays)
        caches, logits = open_caches(cuda, "h1b", LONG), []
        for n in (28, 40):
            tokens = np.random.default_rng(n).integers(0, golden_cases.VOCAB, n + 12)
            assert rewind(caches, 0) == 0
            cuda.prefill(cuda.embed(tokens[:n], 0), caches)
            logits += [to_host(cuda.step(token, caches)).copy() for token in tokens[n:]]
            with pytest.raises(CaptureError, match="9 bytes"):
                device.driver.capture(mock.Mock(side_effect=MemoryError("Out of memory allocating 9 bytes")))
        rows.append(np.stack(logits))
        assert cuda.graph_runner.n_replayed >= 2 * (12 - 3) if replays else not cuda.graph_runner.n_replayed
    np.testing.assert_allclose(rows[0], rows[1], atol=1e-5, rtol=0)


PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=0.9, top_k=7, top_p=1.0, min_p=0.1, seed=3, repetition_penalty=1.4),
    SamplingParams(1.0, top_k=0, top_p=0.6, min_p=0.02, seed=4, repetition_penalty=1.2, repetition_window=4),
    SamplingParams(1.0, seed=5, frequency_penalty=0.7, presence_penalty=-0.4, logit_bias={7: 4, 9: -100}),
]


@pytest.mark.parametrize("params", PARAMS)
def test_tokens_are_chosen_as_on_the_host(device: OnDevice, params: SamplingParams) -> None:
    rng = np.random.default_rng(0)
    here, there, history = Sampler(params, 300, 3), Sampler(params, 300, 3), list(range(10, 20))
    for _ in range(20):
        logits = (rng.standard_normal(300) * 3).astype(np.float32).round(1)  # with ties
        expected = here.sample(logits, history)
        assert there.sample(device.up(logits), history) == expected
        history.append(expected)


STORY = "Once upon a time there was a little girl named Lily. She liked to play outside in the park with her dog."


@pytest.mark.parametrize("name", ["stories260K", "demo"])
@pytest.mark.parametrize(("weights", "prompt"), [("f32", "Once upon a time"), ("int8", STORY)])
def test_greedy_text_equals_the_cpus(name: str, weights: str, prompt: str, request: pytest.FixtureRequest) -> None:
    """Weights of 8 bits and a prompt of more than a few tokens: it is read in half precision."""
    OnDevice.open("gpu")
    path = shipped_model("demo") if name == "demo" else request.getfixturevalue("shared") / "models" / name
    options: Any = {"kv": "dense", "ctx": 300, "weights": weights}
    here, there = (text(Session.load(path, **options, device=each), prompt, 100) for each in ("numpy", "cuda"))
    assert there == here


GPU_SCHEMES = ["f16", "planes", "onebit:residual_length=8", "kivi2:residual_length=32", "kvcomp:block=32"]
CTX = 256


def spoken(session: Session, prompt: list[int]) -> list[int]:
    """Returns greedy tokens after a prompt in a conversation of its own."""
    session.reset()
    return text(session, prompt)


def texts_of(session: Session) -> list[list[int]]:
    """Returns texts after prompts of several lengths."""
    draws = (np.random.default_rng(n).integers(3, golden_cases.VOCAB, n) for n in (5, 64, 230))
    return [spoken(session, prompt.tolist()) for prompt in draws]


def test_sessions_one_after_the_other(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the same text twice, the CPU's where nothing is rounded; an earlier one goes on last."""
    OnDevice.open("gpu")
    before: tuple[Session, list[list[int]]] | None = None
    for family, scheme, form in pairs(family=REPLAYED + STEPPED, scheme=GPU_SCHEMES, form=["f32", "int8", "int4"]):
        config = golden_cases.CASES[family]
        longer = {key: CTX for key in ("max_position_embeddings", "n_positions") if key in config}
        monkeypatch.setitem(golden_cases.CASES, family, config | longer)
        path = golden_cases.write_checkpoint(family, tmp_path / f"{family}-{scheme}-{form}".replace(":", "-"))
        options: dict[str, Any] = {"kv": scheme, "ctx": CTX, "weights": form}
        try:
            session = Session.load(path, device="cuda", **options)
        except EdgeKVError:
            assert family == "gemma2-options"  # not every scheme has bounded scores
            continue
        found = texts_of(session)
        assert texts_of(session) == found, (family, scheme, form)
        if (form, scheme) == ("f32", "f16"):
            with Session.load(path, device="cpu", **options) as here:
                assert found == texts_of(here), family
        if before is not None:
            assert texts_of(before[0]) == before[1], (family, scheme, form)
            before[0].close()
        before = session, found


def test_sessions_in_threads_beside_each_other(tmp_path: pathlib.Path) -> None:
    OnDevice.open("gpu")
    path = golden_cases.write_checkpoint("llama2-gqa", tmp_path / "model")
    sessions = [Session.load(path, kv=kv, ctx=64, device="cuda") for kv in ("f16", "h1b")]
    expected = [[spoken(session, [5, 6, 7])] * 5 for session in sessions]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda session: [spoken(session, [5, 6, 7]) for _ in range(5)], sessions)) == expected


def test_quality_is_the_cpus(tmp_path: pathlib.Path, device: OnDevice) -> None:
    """`edgekv eval`: all tokens through the caches, logits compared where they are."""
    model = Model.open(golden_cases.write_checkpoint("llama2-gqa", tmp_path / "model"))
    tokens = np.random.default_rng(0).integers(0, golden_cases.VOCAB, CAPACITY)
    form, spec = model.weight_format("f32"), CacheSpec.parse("onebit:residual_length=8")
    both = find_device("numpy").decoder(model, form, CAPACITY, 1, None), decoder(model, device)
    here, there = (evaluate(each, tokens, CAPACITY, [spec])[0] for each in both)
    assert there.perplexity == pytest.approx(here.perplexity, rel=1e-3)
    assert there.kl == pytest.approx(here.kl, abs=1e-3)
    assert (there.cache_bytes, there.bytes_read_per_token) == (here.cache_bytes, here.bytes_read_per_token)


def test_out_of_memory_while_decoding(device: OnDevice, tmp_path: pathlib.Path) -> None:
    """An EdgeKVError with what was asked for and what is free; then the conversation goes on as if nothing was."""
    model = Model.open(golden_cases.write_checkpoint("llama2-gqa", tmp_path / "model"))
    cuda = decoder(model, device)
    if not hasattr(cuda.backend.driver, "free"):
        pytest.skip("a real GPU's memory is not filled by a test")
    texts = []
    for short_of in (False, True):
        state = State(open_caches(cuda, "kivi2:residual_length=0", CAPACITY), cuda.config.rope_invalidates_keys)
        runner = Runner(state, cuda, SerialScheduler(cuda.threads), CAPACITY, 0)
        cuda.workspace = type(cuda.workspace)(cuda.backend.driver)
        runner.append([1, 2, 3], [])
        if short_of:
            cuda.backend.driver.free = 3000
            cuda.workspace = type(cuda.workspace)(cuda.backend.driver)
            said = "out of memory while reading 30 tokens after 3: Out of memory allocating.* 2.9 KiB is free"
            with pytest.raises(MemoryBudgetError, match=f"^.*{said}.*$"):  # a line
                runner.append(list(range(30)), [])
            cuda.backend.driver.free = type(cuda.backend.driver).free
            assert state.n_cached == len(state.tokens) == 3
        texts.append(to_host(runner.append([4, 5], [])).copy())
    np.testing.assert_array_equal(*texts)


def test_embeddings_are_the_cpus(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_decoder, "Driver", HostDriver)
    monkeypatch.setattr(cuda_decoder.cupy_driver, "require_cupy", lambda: None)
    monkeypatch.setattr(CudaBackend, "free_bytes", staticmethod(lambda: 1 << 40))
    path = golden_cases.write_checkpoint("llama2-gqa", tmp_path / "model")
    here, there = (Session.load(path, kv="f16", weights="f32", device=each) for each in ("numpy", "cuda"))
    np.testing.assert_allclose(there.embed([1, 2, 3]), here.embed([1, 2, 3]), atol=1e-5, rtol=0)


def test_a_gpu_that_fails(tmp_path: pathlib.Path) -> None:
    host = OnDevice.open("host")
    cuda = decoder(Model.open(golden_cases.write_checkpoint("llama2-gqa", tmp_path / "model")), host)
    state = State(open_caches(cuda, "h1b", CAPACITY), cuda.config.rope_invalidates_keys)
    runner = Runner(state, cuda, SerialScheduler(1), CAPACITY, 0)
    problem = RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")
    host.driver.launch = mock.Mock(side_effect=problem)
    with pytest.raises(SessionError, match=r"device='cuda': CUDA_ERROR_ILL.* while reading 3 tokens .*start"):
        runner.append([1, 2, 3], [])


def test_a_constraint_rules_out_tokens_of_the_device(device: OnDevice) -> None:
    """The choice is then made on the host; log probabilities are the model's own."""
    chosen, decoder = [], SimpleNamespace(backend=SimpleNamespace(free_bytes=lambda: 0))
    runner = SimpleNamespace(decoder=decoder, state=SimpleNamespace(tokens=[1]), add=chosen.append)
    constraint = SimpleNamespace(
        allowed=lambda logits: np.where(np.arange(8) == 3, logits, np.float32(-np.inf)), accept=lambda token: False
    )
    for image_token in (None, 5):
        sampler = Sampler(SamplingParams(temperature=0.7, seed=1), 8, 2)
        choose_token(runner, sampler, device.up(np.arange(8, dtype=np.float32)), constraint, image_token)
        assert sampler.logprobs[0].logprob == pytest.approx(-4.4584, abs=1e-3)
    assert chosen == [3, 3]


def test_out_of_memory_while_sampling() -> None:
    problem = MemoryError("Out of memory allocating 9 bytes (allocated so far: 0 bytes).")
    decoder = SimpleNamespace(backend=SimpleNamespace(free_bytes=lambda: 5 << 20))
    short = SimpleNamespace(decoder=decoder, state=SimpleNamespace(tokens=(1,)))
    with pytest.raises(MemoryBudgetError, match=r"choosing a token: .* 9 bytes .*; 5.0 MiB is free"):
        choose_token(short, mock.Mock(**{"sample.side_effect": problem}), np.zeros(3), None, None)


@pytest.mark.parametrize("weights", ["int8", "int4-32", "f32", "q5"])
def test_linear_layers_in_halves(
    device: OnDevice, weights: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slab by slab, with biases, onto a residual; numbers beyond the largest half stay numbers."""
    model = Model.open(golden_cases.write_checkpoint("llama-biases", tmp_path / "model"))
    store = model.store(model.weight_format(weights))
    ops = CudaOps(DeviceWeights(store, device.driver, None), halves=True)
    monkeypatch.setattr(CudaOps, "_slab_rows", lambda *_: 20)  # several slabs, the last one shorter
    rng, error = np.random.default_rng(0), 2e-3 if weights == "q5" else 2e-5  # sums of the rotation decide ties
    for name in ("0.qkv", "0.out", "0.down"):
        matrix, bias = store.matrix(name), store.bias(name)
        x = rng.standard_normal((11, matrix.shape[1]), dtype=np.float32)
        factors = [x.astype(np.float16).astype(np.float32), matrix]
        factors = [gaussian.rotate(factor) if weights == "q5" else factor for factor in factors]
        halves = [factor.astype(np.float16).astype(np.float32) for factor in factors]
        expected = halves[0] @ halves[1].T + (0 if bias is None else bias)
        np.testing.assert_allclose(to_host(ops.linear(device.up(x), name)), expected, atol=error)
        residual = rng.standard_normal(expected.shape, dtype=np.float32)
        summed = ops.add_linear(device.up(residual), device.up(x.astype(np.float16)), name)
        np.testing.assert_allclose(to_host(summed), residual + expected, atol=error)
    huge = device.up(np.full((9, 64), 1e30, np.float32))
    assert np.isfinite(to_host(ops.linear(huge, "0.qkv"))).all()
    undefined = device.up(np.full((9, 64), np.nan, np.float32))
    assert np.isnan(to_host(ops.linear(undefined, "0.qkv"))).all()


@pytest.mark.parametrize(
    ("name", "text", "tiles"),
    [
        ("llama2-gqa", "dense:dtype=f32", False),
        ("llama-head-dim", "h1b", True),
        ("mistral", "onebit:residual_length=8", True),
        ("gpt2", "dense", True),
        ("olmo2", "dense", True),
        ("gemma2-options", "dense", True),
    ],
)
def test_logits_of_prompts_are_those_of_float32_within_a_halfs_error(
    device: OnDevice, monkeypatch: pytest.MonkeyPatch, name: str, text: str, tiles: bool, tmp_path: pathlib.Path
) -> None:
    """Prompts are read in chunks, one of few tokens; without tiles (sm_70, sm_72) attention is in float32."""
    model = Model.open(golden_cases.write_checkpoint(name, tmp_path / "model"))
    form, tokens = model.weight_format("int8"), golden_cases.tokens(name)[:43]
    monkeypatch.setattr(cuda_decoder, "chunk_tokens", lambda *_: 20)
    device.driver.has_half_mma = tiles
    store = DeviceWeights(model.store(form), device.driver, None)
    half, logits = Decoder(CudaBackend(store, device.driver, 1), CAPACITY + 16), []
    for each in (find_device("numpy").decoder(model, form, CAPACITY + 16, 1, None), half):
        caches = open_caches(each, text, CAPACITY + 16)
        x = each.prefill(each.embed(tokens, 0), caches)
        parts = [x]
        if text.startswith("dense"):  # signs of keys near 0 may differ
            parts.append(each.prefill(each.embed(tokens[:9] * 2, len(tokens)), caches))  # goes through the caches
        logits.append(np.concatenate([to_host(each.head(part)) for part in parts]))
    assert np.abs(logits[1] - logits[0]).max() < LOGIT_ERROR * np.abs(logits[0]).max()


HEADS: list[Heads] = [(2, 2, 64), (6, 2, 24)]
LAYER = {"layer": 2, "n_layers": 4}
CACHE_CAPACITY = 150
# Small windows and budgets, so that few tokens reach every part of a scheme.
SMALL_SCHEMES = {
    "kivi2": "kivi2:residual_length=32", "onebit": "onebit:residual_length=16",
    "kvcomp": "kvcomp:residual_length=16,block=32", "fier": "fier:k=32", "quest": "quest:k=32",
}  # fmt: skip
CACHE_TOLERANCE = 2e-3  # that of the contract test of all schemes
VARIANTS = [SMALL_SCHEMES.get(name, name) for name in ON_CUDA]
VARIANTS += ["dense:dtype=f32", "dense:dtype=q8", "onebit:residual_length=16,v_bits=3"]


def converse(cache: KVCache, up: Any, heads: Heads) -> np.ndarray:
    """A prompt, single tokens, several at once, a rewind, one more: all that attends."""
    read_prompt(cache, [*map(up, draw(heads, 100))])
    out = [to_host(cache.attend(*map(up, draw(heads, n, seed)))).copy() for seed, n in enumerate((1, 1, 1, 9), 1)]
    cache.truncate(105)
    out.append(to_host(cache.attend(*map(up, draw(heads, 1, 5)))).copy())
    return np.concatenate(out, axis=1)


@pytest.mark.parametrize(("text", "heads"), [(text, HEADS[i % 2]) for i, text in enumerate(VARIANTS)], ids=str)
def test_caches_equal_the_numpy_ones(device: OnDevice, text: str, heads: Heads) -> None:
    here = make(text, heads, CACHE_CAPACITY, "numpy", **LAYER)
    there = make(text, heads, CACHE_CAPACITY, device.kernels, device.driver, **LAYER)
    expected, actual = converse(here, lambda x: x, heads), converse(there, device.up, heads)
    assert np.linalg.norm(actual - expected) < CACHE_TOLERANCE * np.linalg.norm(expected)
    assert there.n_seen == here.n_seen
    assert there.nbytes == here.nbytes
    device.check_arrays(here, there)
    assert here.truncate(0) == there.truncate(0) == 0
    again = there.attend(*map(device.up, draw(heads, 40, 6)))
    assert_close(to_host(again), here.attend(*draw(heads, 40, 6)), CACHE_TOLERANCE)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_steady_step_changes_counters_alone(name: str) -> None:
    """`advance` changes them as appending does, until `flush` is due."""
    cache = make(SMALL_SCHEMES.get(name, name), HEADS[1], CACHE_CAPACITY, "numpy", **LAYER)
    cache.attend(*draw(HEADS[1], 70))
    for seed in range(CACHE_CAPACITY - 70):
        if not cache.is_static():
            continue
        before = cache.state().counters
        cache.advance(1)
        expected, is_due = cache.state().counters, cache.needs_flush()
        cache.advance(-1)
        assert cache.state().counters == before
        cache.attend(*draw(HEADS[1], 1, seed))
        assert (cache.state().counters != expected) == is_due
        assert not cache.needs_flush()
    assert not cache.is_static()
