"""tools/adapt.py: the student computes what edgekv computes, learns, and leaves an adapter that edgekv takes."""

import itertools
import json
import pathlib
from typing import Any

import golden_cases
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'edgekv[torch]'")

ROOT = pathlib.Path(__file__).resolve().parent.parent

import adapt  # noqa: E402
from adapt_rounding import (  # noqa: E402
    Sign,
    rounded_gauss,
    rounded_int4,
    rounded_means,
    rounded_queries,
    soft_sign,
)
from adapt_schemes import SCHEMES  # noqa: E402
from adapt_training import Settings, Trainer  # noqa: E402

from edgekv import Session  # noqa: E402
from edgekv.checkpoint.adapter import Adapter  # noqa: E402
from edgekv.checkpoint.source import open_source  # noqa: E402
from edgekv.errors import EdgeKVError  # noqa: E402
from edgekv.kernels import numpy_kernels  # noqa: E402
from edgekv.kernels.reference.interleaved_values import values_interleaved  # noqa: E402
from edgekv.kernels.reference.papers.int4 import encode_int4, values_int4  # noqa: E402
from edgekv.kernels.reference.planes import round_queries  # noqa: E402
from edgekv.kvcache import CacheSpec  # noqa: E402
from edgekv.kvcache.geometry import Workspace  # noqa: E402
from edgekv.models import architecture  # noqa: E402
from edgekv.quality.evaluate import evaluate  # noqa: E402
from edgekv.session.devices import find_device  # noqa: E402
from edgekv.session.model import Model  # noqa: E402

N = 48
V_PROJ = {
    "llama31": {f"model.layers.{i}.self_attn.v_proj.weight" for i in range(3)},
    "llama-biases": {f"model.layers.{i}.self_attn.v_proj.{end}" for i in range(3) for end in ("weight", "bias")},
    "gpt2": {f"transformer.h.{i}.attn.c_attn.{end}" for i in range(3) for end in ("weight", "bias")},
}
G, T, D = 2, 128, 64
NORMAL = np.random.default_rng(0).standard_normal((G, T, D)).astype(np.float32)
EACH = np.broadcast_to(np.eye(T, dtype=np.float32), (G, T, T))  # probabilities that take one token each


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    """Threads that wait for each other take longer than these models, and on a busy machine very long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def zeros(dtype: str, *shape: int) -> np.ndarray:
    """What a kernel writes of each token."""
    return np.zeros((G, T, *shape), dtype)


def windows(n: int = 3) -> Any:
    return torch.from_numpy(np.random.default_rng(0).integers(0, golden_cases.VOCAB, (n, N)))


def trainer(case: str, kv: str, folder: pathlib.Path, rows: Any = None, **settings: Any) -> Trainer:
    source = open_source(golden_cases.write_checkpoint(case, folder / case))
    known = {"held_back": 1, "batch": 2, "lr": 3e-3}
    rows = windows() if rows is None else rows
    return Trainer(source, CacheSpec.parse(kv), rows, Settings(**(known | settings)))


def written(made: Trainer, kv: str, folder: pathlib.Path) -> pathlib.Path:
    """The adapter of the student as it is after one step."""
    made.update(made.windows[:2])
    path = folder / "adapter.safetensors"
    base = made.student.weights.base.source.identity
    adapt.write_adapter(path, base, CacheSpec.parse(kv), made.result(), {})
    return path


LEARNING = {"projection": True, "anneal": 0.5, "attention": 0.3}


@pytest.mark.parametrize(
    ("case", "kv", "scope"),
    [
        ("llama31", "h1b", "head"),
        ("llama-biases", "h1b:keys_only=1,sketch_bits=512", "global"),
        ("qwen3", "sign_keys:seed=3", "layer"),
        ("gpt2", "h1b:sketch_bits=64", "global"),
        ("gpt2-options", "h1b", "head"),
        ("llama31", "h1b:sketch_bits=128", "learned"),
        ("gpt2", "sign_keys", "learned"),
    ],
)
def test_the_student_computes_what_edgekv_computes(case: str, kv: str, scope: str, tmp_path: pathlib.Path) -> None:
    """`edgekv eval`'s own path with the adapter, from the embedding to the perplexity."""
    settings = {"scope": "head", **LEARNING} if scope == "learned" else {"scope": scope}
    made = trainer(case, kv, tmp_path, **settings)
    model = Model.open(tmp_path / case, adapter=written(made, kv, tmp_path))
    decoder = find_device("numpy").decoder(model, model.weight_format("f32"), N, 1, None)
    spec = CacheSpec.parse(kv)
    caches = spec.layers(model.config, N)
    model.adapter.adapt(caches)
    for cache in caches:
        cache.allocate(decoder.kernels, decoder.workspace)
    ids = made.windows[2]
    expected = decoder.prefill(decoder.embed(ids.numpy(), 0), caches, exact=False)
    made.quality()  # with signs, and without comparing
    with torch.no_grad():
        found = made.student.states(ids[None])[-1][0].numpy()
        dense = made.teacher.states(ids[None])[-1][0].numpy()
    np.testing.assert_allclose(found, expected, atol=2e-3)  # a projection near 0 may change its sign
    assert np.abs(dense - expected).max() > 1
    (result,) = evaluate(decoder, ids.tolist(), N, [spec], adapter=model.adapter)
    assert made.quality().perplexity == pytest.approx(result.perplexity, rel=1e-4)


@pytest.mark.parametrize(
    ("case", "kv"),
    [
        ("llama31", "onebit:sink=3,residual_length=20,key_scale=0.7"),
        ("llama-head-dim", "onebit:sink=0,residual_length=0,v_bits=3"),
        ("qwen3", "onebit:v_bits=1"),
        ("gpt2", "onebit:v_bits=4,seed=5"),
    ],
)
def test_onebit_attends_as_the_cache_does(case: str, kv: str) -> None:
    """One layer, up to the 8-bit weights of the cache's sums; over many, flipped signs grow to more."""
    n, config = 300, architecture(golden_cases.CASES[case]).config
    rng = np.random.default_rng(1)
    sizes = config.n_heads, config.n_kv_heads, config.n_kv_heads
    q, k, v = (rng.standard_normal((heads, n, config.head_dim)).astype(np.float32) for heads in sizes)
    k += 3
    spec = CacheSpec.parse(kv)
    cache = spec.layers(config, n)[0]
    cache.allocate(numpy_kernels(), Workspace())
    expected = cache.attend(q / 4, k, v)
    scheme = SCHEMES["onebit"](spec, config, "head", "cpu")
    scheme.start([])
    with torch.no_grad():
        found = scheme(0, *(torch.from_numpy(x)[None] for x in (q / 4, k, v)))[0].numpy()
    np.testing.assert_allclose(found, expected, atol=0.01 * np.abs(expected).max())


def test_four_bit_values_are_the_kernels() -> None:
    codes, delta, zero = zeros("uint8", D // 2), zeros("uint16"), zeros("uint8")
    encode_int4(NORMAL, codes, delta, zero, 0)
    stored = zeros("float32", D)
    values_int4(EACH, 0, codes, delta, zero, 0, T, stored)
    np.testing.assert_array_equal(rounded_int4(torch.from_numpy(NORMAL)).numpy(), stored)


def test_rounded_queries_are_the_kernels() -> None:
    whole, step = round_queries(NORMAL)
    rounded = rounded_queries(torch.from_numpy(NORMAL)).numpy()
    np.testing.assert_allclose(rounded, whole * step[..., None], rtol=1e-6)


def test_centres_are_the_kernels() -> None:
    rest, blocks = NORMAL.copy(), (G, T // 64, 5)
    numpy_kernels().encode_centres(rest, np.zeros((*blocks, D // 2), np.uint8), np.zeros(blocks, np.uint16), 0)
    x = torch.from_numpy(NORMAL)[None]
    centre = rounded_means(x, 64)
    centre = centre + rounded_means(x - centre, 16)
    np.testing.assert_allclose(centre[0].numpy(), NORMAL - rest, atol=1e-5)


def test_rotated_values_are_the_kernels() -> None:
    codes, scale, stored = np.zeros((G, T // 64, 4, D, 4), np.uint8), zeros("uint16"), zeros("float32", D)
    numpy_kernels().encode_interleaved(NORMAL, codes, scale, 0)
    values_interleaved(EACH, 0, codes, scale, 0, T, stored)
    np.testing.assert_allclose(rounded_gauss(torch.from_numpy(NORMAL), 2).numpy(), stored, rtol=1e-5)


def test_soft_signs_go_from_the_exact_scores_to_signs() -> None:
    x = torch.from_numpy(NORMAL)[None]
    linear = soft_sign(x, 1e-3)
    np.testing.assert_allclose(linear, x / x.square().mean((0, 2, 3), keepdim=True).sqrt(), atol=1e-4)
    np.testing.assert_allclose(soft_sign(x, 1e6), torch.where(x >= 0, 1.0, -1.0), atol=1e-3)


@pytest.mark.parametrize("case", ["llama2-gqa", "gpt2"])
def test_an_annealed_student_starts_as_the_teacher(case: str, tmp_path: pathlib.Path) -> None:
    """But for the 4-bit values: its first loss is far below that of signs."""
    signs = trainer(case, "h1b:keys_only=1", tmp_path, scope="head", projection=True)
    soft = trainer(case, "h1b:keys_only=1", tmp_path, scope="head", **LEARNING | {"attention": 0.0})
    losses = [made.update(made.windows[:1]) for made in (signs, soft)]
    assert losses[1] < 0.3 * losses[0]
    assert soft.scheme.hardness > 0
    soft.quality()
    assert soft.scheme.hardness == 0


def test_signs_pass_a_gradient_on_near_zero_alone() -> None:
    x = torch.tensor([-3.0, -0.5, 0.0, 0.5, 3.0], requires_grad=True)
    signs = Sign.apply(x)
    signs.sum().backward()
    assert signs.tolist() == [-1, -1, 1, 1, 1]
    slope = x.grad.tolist()
    assert slope == slope[::-1]
    assert slope[2] > slope[3] > slope[4] > 0


@pytest.mark.parametrize(
    ("kv", "scope"),
    [
        ("h1b:sketch_bits=64", "global"),
        ("h1b:sketch_bits=64", "layer"),
        ("h1b:sketch_bits=64", "learned"),
        ("onebit:residual_length=0,sink=0", "head"),
    ],
)
def test_training_brings_the_student_nearer(kv: str, scope: str, tmp_path: pathlib.Path) -> None:
    """On the window that it learns by heart; what is frozen, the teacher with it, stays as it was."""
    rows = torch.from_numpy(np.random.default_rng(0).integers(0, golden_cases.VOCAB, (1, 200))).repeat(2, 1)
    settings = {"scope": "head", **LEARNING} if scope == "learned" else {"scope": scope}
    made = trainer("llama2-gqa", kv, tmp_path, rows, epochs=10, lr=2e-2, **settings)
    lines: list[str] = []
    best = made.train(lines.append)
    assert best.quality.kl < 0.8 * made.untrained.quality.kl
    assert best.quality.dense == made.untrained.quality.dense


def test_the_best_is_kept(tmp_path: pathlib.Path) -> None:
    """Steps that are far too long make every later student worse than the untrained one."""
    made = trainer("llama2-gqa", "h1b", tmp_path, lr=10.0)
    best = made.train(lambda line: None)
    assert (best.step, made.step) == (0, 2)
    base = golden_cases.tensors("llama2-gqa")
    for name in V_PROJ["llama31"]:
        np.testing.assert_array_equal(best.tensors[name].numpy(), base[name])


@pytest.mark.parametrize("case", V_PROJ)
def test_only_the_values_projection_is_replaced(case: str, tmp_path: pathlib.Path) -> None:
    made = trainer(case, "h1b", tmp_path)
    adapter = Adapter.open(written(made, "h1b", tmp_path))
    assert (set(adapter.weights), adapter.value.shape) == (V_PROJ[case], ())
    config, base = made.teacher.config, golden_cases.tensors(case)
    for name in adapter.weights:
        change = adapter.file.array(name) != base[name]
        changed = np.atleast_2d(change).any(axis=0)  # of a c_attn: by output
        first = 2 * config.hidden_size if "c_attn" in name else 0
        np.testing.assert_array_equal(changed, np.arange(len(changed)) >= first)


def test_qkv_trains_all_three(tmp_path: pathlib.Path) -> None:
    adapter = Adapter.open(written(trainer("llama31", "h1b", tmp_path, train="qkv"), "h1b", tmp_path))
    base = golden_cases.tensors("llama31")
    assert len(adapter.weights) == 9
    assert all((adapter.file.array(name) != base[name]).any() for name in adapter.weights)


@pytest.mark.parametrize(("kv", "heads"), [("h1b", 4), ("sign_keys", 4), ("onebit:residual_length=0", 2)])
def test_a_session_takes_the_adapter(kv: str, heads: int, tmp_path: pathlib.Path) -> None:
    made = trainer("llama31", kv, tmp_path, scope="head")
    path = written(made, kv, tmp_path)
    session = Session.load(tmp_path / "llama31", kv=kv, adapter=path, weights="f32", device="numpy")
    setting = made.scheme.setting
    codec = session.state.caches[1].key_codec
    np.testing.assert_array_equal(getattr(codec, setting).ravel(), made.scheme.value[1].detach().numpy())
    assert made.scheme.value.shape == (3, heads)
    assert "(adapter adapter.safetensors)" in session.state.caches[1].notes()[0]
    assert not session.state.caches[1].exact_prefill


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_adapter_has_the_checkpoints_precision(dtype: str, tmp_path: pathlib.Path) -> None:
    """And validation uses the rounded weights."""
    import safetensors.torch as files

    folder = golden_cases.write_checkpoint("gpt2", tmp_path / "gpt2")
    half = {n: torch.from_numpy(x).to(getattr(torch, dtype)) for n, x in golden_cases.tensors("gpt2").items()}
    files.save_file(half, folder / "model.safetensors")
    source = open_source(folder)
    made = Trainer(source, CacheSpec.parse("h1b"), windows(), Settings(held_back=1, batch=2, lr=1e-3))
    path = written(made, "h1b", tmp_path)
    stored = files.load_file(path)
    assert {str(x.dtype) for name, x in stored.items() if name != "tau"} == {f"torch.{dtype}"}
    name = "transformer.h.1.attn.c_attn.weight"
    weight, _ = made.trained.linear("1.qkv")
    np.testing.assert_array_equal(stored[name].float().T, weight.detach())
    assert not torch.equal(stored[name], half[name])


def test_the_time_limit_ends_training(tmp_path: pathlib.Path) -> None:
    made = trainer("llama31", "h1b", tmp_path, seconds=1e-6, epochs=1000)
    assert made.train(lambda line: None).step == made.step == 0
    assert made.progress == 1


def test_what_can_not_be_trained_says_so(tmp_path: pathlib.Path) -> None:
    with pytest.raises(EdgeKVError, match=r"^the text fills 3 windows and 4 are held back: give more text"):
        trainer("llama31", "h1b", tmp_path, held_back=4)
    with pytest.raises(EdgeKVError, match="has sliding windows"):
        trainer("mistral", "h1b", tmp_path)


def test_windows_come_from_whole_books_in_a_random_order() -> None:
    class Letters:
        def encode(self, text: str) -> list[int]:
            return [ord(letter) for letter in text]

    books = ["a" * 7, "b" * 6, " \n", "c" * 5]
    text = "\0".join(books)
    rows = adapt.read_windows(text, Letters(), 4, 0, seed=0)
    joined = "".join(map(chr, rows.flatten().tolist()))
    orders = ["".join(order) for order in itertools.permutations((*books[:2], books[3]))]
    assert joined in {order[:16] for order in orders}
    assert len({adapt.read_windows(text, Letters(), 4, 0, seed).sum().item() for seed in range(9)}) > 1
    assert adapt.read_windows(text, Letters(), 4, 9, seed=0).tolist() == rows[:2].tolist()


def test_the_command_writes_an_adapter_with_its_provenance(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "adapter.safetensors"
    text.write_text("It was late, and the rain fell. She went to the town.\n" * 20)
    command = ["--model", str(ROOT / "models" / "demo"), "--text", str(text), "--out", str(out)]
    command += ["--kv", "h1b:sketch_bits=64", "--ctx", "32", "--held-back", "1", "--batch", "2", "--tokens", "96"]
    assert adapt.main([*command, "--epochs", "1", "--scope", "layer", "--seed", "3"]) == 0
    assert "3 windows of 32 tokens" in (printed := capsys.readouterr().out)
    assert "step 1 of 1" in printed
    facts = Adapter.open(out).file.metadata
    settings = json.loads(facts["settings"])
    assert (settings["seed"], settings["scope"], settings["lr"]) == (3, "layer", 1e-4)
    assert (facts["kv"], facts["text"], facts["steps"]) == (
        str(CacheSpec.parse("h1b:sketch_bits=64")),
        "text.txt",
        "1",
    )
    assert len(facts["text_sha256"]) == 64
    assert json.loads(facts["held_back_untrained"])["dense"] == json.loads(facts["held_back"])["dense"]
    Model.open(ROOT / "models" / "demo", adapter=out)
    for wrong, message in (
        ("dense", "has nothing to train; accepted: h1b, sign_keys, onebit"),
        ("h1b:sketch_bits=65", "sketch_bits=65"),
    ):
        assert adapt.main([*command, "--kv", wrong]) == 2
        assert message in capsys.readouterr().err
