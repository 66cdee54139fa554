"""Quality, the gate and its memory, needles, `edgekv bench` and `edgekv demo`."""

import dataclasses
import json
import pathlib
import re
import shutil
from typing import Any

import golden_cases
import numpy as np
import pytest
from helpers import HAS_PAPERS, SCHEMES, Cli
from safetensors.numpy import save_file

from edgekv import Session
from edgekv.checkpoint.checkpoint import open_checkpoint
from edgekv.checkpoint.hub import load_shape, shipped_model
from edgekv.checkpoint.tensors import to_float32
from edgekv.engine.decoder import Decoder
from edgekv.engine.loading import find_device
from edgekv.engine.model import Model
from edgekv.engine.verdicts import Verdicts, needs_gate
from edgekv.errors import CheckpointError
from edgekv.eval.bench import MATMUL_METHODS, SchemeTimer, bench, bench_prefill
from edgekv.eval.evaluate import Quality, evaluate
from edgekv.eval.gate import DEFAULT_SCHEMES, GateLimits, Prose, Verdict, gate, judge, make_haystack, recommended
from edgekv.kvcache import CacheSpec
from edgekv.models import architecture
from edgekv.text import Tokenizer, load_tokenizer
from edgekv.weights.formats import ModelFormat
from edgekv.weights.random_weights import random_store

SENTENCES = (
    "He went to the town, and the rain fell on the road.",
    '"Who is there?" she said, and there was no answer.',
    "It was late in the evening, and nobody had seen the boat.",
    "The old man looked at the fire for a long time.",
)
QUALITY = Quality(str(CacheSpec.parse("onebit")), 1024, 20.0, 1.0, 0.01, 0.01, 0.95, 0.95, 100, 100, 1.0, ())


@pytest.fixture(scope="module")
def prose_text() -> str:
    order = np.random.default_rng(0).integers(len(SENTENCES), size=300)
    return " ".join(SENTENCES[i] for i in order)


def opened(path: pathlib.Path, ctx: int) -> tuple[Decoder, Tokenizer]:
    model = Model.open(path)
    tokenizer = load_tokenizer(model.tokenizer_path, config=model.raw_config)
    return find_device("cpu").decoder(model, model.weight_format("f32"), ctx, 2, None), tokenizer


@pytest.fixture(scope="module")
def demo() -> tuple[Decoder, Tokenizer]:
    return opened(shipped_model("demo"), 1024)


@pytest.fixture
def own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The folder in which the gates of this test alone are remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "edgekv" / "gates"


def test_a_perplexity_by_hand(model: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes each token's probability after those before it in its window."""
    monkeypatch.setattr("edgekv.eval.evaluate.LOGIT_ROWS", 7)  # several pieces, and a rest
    exact, ctx, tokens = "dense:dtype=f32", 24, golden_cases.tokens("llama31")
    session, losses = Session.load(model, kv=exact, weights="f32"), []
    for window in (tokens[:ctx], tokens[ctx : 2 * ctx]):
        session.reset()
        logits = session.logits(window).astype(float)
        for i, following in enumerate(window[1:]):
            losses.append(np.log(np.exp(logits[i]).sum()) - logits[i, following])
    specs = [CacheSpec.parse(exact), CacheSpec.parse("kivi2:residual_length=0")]
    form = session.model.weight_format("f32")
    decoder = find_device("cpu").decoder(session.model, form, ctx, 1, None)
    plain, lossy = evaluate(decoder, tokens, ctx, specs)
    assert plain.perplexity == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)
    assert plain.perplexity_ratio == pytest.approx(1, rel=1e-6)
    assert lossy.perplexity == pytest.approx(lossy.perplexity_ratio * plain.perplexity, rel=1e-6)


MISSED = {
    "nothing": ({}, (20, 20), ()),
    "at the limits": ({"kl": 0.05, "top1": 0.9}, (18, 20), ()),
    "kl": ({"kl": 0.06}, (20, 20), ("KL 0.0600, more than 0.05",)),
    "kl late": ({"kl_second_half": 0.07}, None, ("KL 0.0700, more than 0.05",)),
    "kl nan": ({"kl": float("nan"), "kl_second_half": float("nan")}, None, ("KL nan, more than 0.05",)),
    "top-1 late": ({"top1_second_half": 0.89}, None, ("top-1 0.890, less than 0.9",)),
    "needles": ({}, (17, 20), ("needles 17 of 20, less than 90%",)),
    "two": ({"kl": 1.0}, (0, 20), ("KL 1.0000, more than 0.05", "needles 0 of 20, less than 90%")),
}


def test_a_verdict_names_every_limit_that_was_missed() -> None:
    for changes, needles, failures in MISSED.values():
        verdict = judge(dataclasses.replace(QUALITY, **changes), needles, GateLimits())
        assert (verdict.failures, verdict.passed) == (failures, not failures)


def test_the_smallest_cache_that_passed_is_recommended() -> None:
    sizes = {"large": 300, "small": 200, "failed": 100}
    verdicts = [
        Verdict(dataclasses.replace(QUALITY, kv=name, cache_bytes=size), None, ("KL",) * (name == "failed"))
        for name, size in sizes.items()
    ]
    assert recommended(verdicts).kv == "small"
    assert recommended(verdicts[2:]) is None


def test_what_needs_a_gate() -> None:
    exact = {"dense", "dense:dtype=f32", *({"visual1", "visual_planes"} if HAS_PAPERS else ())}
    assert {
        name for name in [*SCHEMES, "dense:dtype=f32", "dense:dtype=q8"] if not needs_gate(CacheSpec.parse(name))
    } == exact
    assert "q8" in DEFAULT_SCHEMES
    assert "f16" not in DEFAULT_SCHEMES


def test_the_demo_is_gated_with_needles(demo: tuple[Decoder, Tokenizer], prose_text: str) -> None:
    decoder, tokenizer = demo
    specs = CacheSpec.parse_list("kivi2:bits=4,streaming:budget=64")
    verdicts, needle_test = gate(decoder, tokenizer, tokenizer.encode(prose_text), specs, 512, n_needles=5)
    assert (needle_test.n_hidden, needle_test.n_known, needle_test.applies) == (5, 5, True)
    exact, forgetful = verdicts
    assert exact.passed
    assert exact.needles == (5, 5)
    assert forgetful.needles[0] <= 2  # those among the latest 64 tokens
    assert [phrase.split()[0] for phrase in forgetful.failures] == ["KL", "top-1", "needles"]


def test_needles_that_dense_misses_are_not_held_against_a_scheme(shared: pathlib.Path, prose_text: str) -> None:
    """stories260K knows no pass keys: the part is not applicable, and nobody passes it."""
    decoder, tokenizer = opened(shared / "models" / "stories260K", 512)
    verdicts, needle_test = gate(
        decoder, tokenizer, tokenizer.encode(prose_text), [CacheSpec.parse("kivi2:bits=4")], 512, n_needles=5
    )
    assert not needle_test.applies
    assert needle_test.note == f"not applicable: the dense cache finds {needle_test.n_known} of 5"
    assert verdicts[0].needles is None


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The demo model as a Qwen2 whose keys are hardly anything but a bias, which few bits can't hold.

    It has 30 times a typical key's norm in the slowest rotary pair, at random signs: that turns so little that it
    adds nearly the same to all scores of a query.
    """
    source, folder = open_checkpoint(shipped_model("demo")), tmp_path_factory.mktemp("biased")
    rng = np.random.default_rng(0)
    arch = architecture(source.config, source.tensors)
    c, half = arch.config, arch.config.head_dim // 2
    tensors = {name: to_float32(source.tensors[name].read()) for name in arch.tensors()}
    for layer in (f"{arch.prefix}layers.{i}." for i in range(c.n_layers)):
        seen = tensors[f"{layer}self_attn.k_proj.weight"] * tensors[f"{layer}input_layernorm.weight"]
        typical = np.sqrt((seen.reshape(c.n_kv_heads, -1) ** 2).sum(1, keepdims=True))
        bias = np.zeros((c.n_kv_heads, c.head_dim), np.float32)
        bias[:, [half - 1, c.head_dim - 1]] = 30 * typical * rng.choice([-1, 1], (c.n_kv_heads, 2))
        each = {"q": np.zeros(c.q_size, np.float32), "k": bias.ravel(), "v": np.zeros(c.kv_size, np.float32)}
        tensors |= {f"{layer}self_attn.{name}_proj.bias": array for name, array in each.items()}
    save_file(tensors, folder / "model.safetensors")
    config = source.config | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(shipped_model("demo") / "tokenizer.model", folder)
    shutil.copy(shipped_model("demo") / "tokenizer_config.json", folder)
    return folder


def test_schemes_and_a_large_key_bias(biased: pathlib.Path, prose_text: str) -> None:
    """Schemes with centres or ranges per channel pass; one scale per token does not, and the gate says so."""
    decoder, tokenizer = opened(biased, 512)
    specs = CacheSpec.parse_list("planes:k_bits=4,v_bits=4,onebit,dense:dtype=q8,int4")
    verdicts, _ = gate(decoder, tokenizer, tokenizer.encode(prose_text), specs, 512, n_needles=0)
    kl = {CacheSpec.parse(verdict.kv).short: verdict.quality.kl for verdict in verdicts}
    assert kl["q4"] < 0.01
    assert kl["onebit"] < 0.05
    assert {CacheSpec.parse(v.kv).short for v in verdicts if not v.passed} >= {"q8", "int4"}


def test_a_verdict_is_remembered_with_what_it_was_measured_on(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Only what passed is taken by `auto`."""
    opened, spec = Model.open(model), CacheSpec.parse("onebit")
    gated = Verdicts(opened, tmp_path / "gates")
    assert gated.verdict(spec) is None
    gated.remember(spec, Verdict(QUALITY, (20, 20), ("KL 1, more than 0.05",)), {"text": "book.txt"})
    gated.remember(CacheSpec.parse("q3"), Verdict(QUALITY, None, ()), {"ctx": 512})
    remembered = Verdicts(opened, tmp_path / "gates").verdict(spec)
    assert remembered["failures"] == ["KL 1, more than 0.05"]
    assert remembered["measured"] == {"text": "book.txt"}
    assert gated.verdict(CacheSpec.parse("onebit:v_bits=1")) is None
    assert (gated.passed(), gated.passed(512), gated.passed(513)) == (["q3"], ["q3"], [])
    (tmp_path / "file").write_text("where a folder should be")
    with pytest.raises(CheckpointError, match="set XDG_CACHE_HOME"):
        Verdicts(opened, tmp_path / "file").remember(spec, judge(QUALITY, None, GateLimits()), {})


def test_new_or_damaged_is_gated_again(model: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    gated, spec = Verdicts(Model.open(model), tmp_path), CacheSpec.parse("onebit")
    gated.remember(spec, judge(QUALITY, None, GateLimits()), {})
    assert gated.warning(spec) is None
    monkeypatch.setattr(spec.scheme, "version", spec.scheme.version + 1)
    assert "was never gated" in gated.warning(spec)
    monkeypatch.undo()
    (file,) = gated.folder.iterdir()
    file.write_bytes(file.read_bytes().replace(b"0.01", b"0.02"))  # a damaged memory counts as none
    assert gated.verdict(spec) is None


def test_a_warning_is_given_once_and_after_a_failed_gate(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    spec = CacheSpec.parse("onebit:v_bits=1")
    gated = Verdicts(Model.open(model), tmp_path / "gates")
    assert f"eval --gate --model {model} --text YOUR-TEXT --kv onebit:v_bits=1" in gated.warn_once(spec)
    assert gated.warn_once(spec) is None
    assert gated.warn_once(CacheSpec.parse("onebit")) is not None
    gated.remember(spec, Verdict(QUALITY, None, ("KL 1, more than 0.05",)), {"text": "book.txt"})
    assert "failed its gate for this model on book.txt: KL 1, more than 0.05" in gated.warn_once(spec)
    assert gated.warn_once(spec) is None
    gated.remember(spec, Verdict(QUALITY, None, ()), {})
    assert gated.warning(spec) is None


def test_the_gates_command(own_cache: pathlib.Path, prose_text: str, tmp_path: pathlib.Path, cli: Cli) -> None:
    (tmp_path / "book.txt").write_text(prose_text)
    command = ["eval", "--gate", "--text", str(tmp_path / "book.txt"), "--ctx", "512", "--needles", "5"]
    cli(*command, "--kv", "kivi2:bits=4,streaming:budget=64", "--json", tmp_path / "gate.json")
    facts = json.loads((tmp_path / "gate.json").read_text())
    assert [verdict["passed"] for verdict in facts["verdicts"]] == [True, False]
    assert (facts["recommended"], facts["settings"]["ctx"]) == ("kivi2:bits=4", 512)
    assert len(list(own_cache.rglob("*.json"))) == 2
    cli(*command, "--kv", "streaming:budget=64", status=1)
    for kv, n_warnings in {"kivi2:bits=4": 0, "streaming:budget=64": 1, "dense": 0}.items():
        said = cli("run", "--prompt", "It was", "--max-new-tokens", "1", "--kv", kv)
        assert said.err.count("edgekv: ") == n_warnings


@pytest.mark.parametrize("name", ["tokenizers/llama2", "models/gpt2-60m", "models/stories260K"])
def test_facts_hide_in_any_tokenizers_text(name: str, shared: pathlib.Path) -> None:
    tokenizer, rng = load_tokenizer(shared / name), np.random.default_rng(1)
    text = " ".join(SENTENCES * 100)
    prose = Prose(np.array(tokenizer.encode(text, bos=False)), tokenizer)
    haystack = make_haystack(rng, prose, 1000, 8)
    written = tokenizer.decode(haystack.ids)
    assert len(haystack.ids) + max(len(q.ids) + q.n_answer for q in haystack.questions) == 1000
    assert haystack.ids[: len(prose.start)] == tokenizer.encode("")
    for question in haystack.questions:
        asked = b"".join(map(tokenizer.token_bytes, question.ids)).decode()
        named = re.fullmatch(r"\n\nWhat is the (.*)\? The \1 is", asked)
        assert named is not None
        assert re.search(rf'[.?!]["\n]* The {named[1]} is {question.fact.value}\.', written)


@pytest.mark.parametrize("text", ["word " * 900, "x" * 4000])
def test_a_text_without_sentences_has_places_too(text: str, demo: tuple[Decoder, Tokenizer]) -> None:
    tokenizer = demo[1]
    prose = Prose(np.array(tokenizer.encode(text, bos=False)), tokenizer)
    ids, owners = prose.weave(np.random.default_rng(1), [(0.5, [7, 7, 7])], 400)
    assert ids[owners == 0].tolist() == [7, 7, 7]
    assert np.flatnonzero(owners == 0)[0] == pytest.approx(200, abs=20)
    with pytest.raises(ValueError, match="too few for a row of"):
        prose.weave(np.random.default_rng(1), [], len(prose.tokens) + 2)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    store = random_store(load_shape("tiny", 2), ModelFormat("q4"))
    model = Model(store.folder, store.config, None, store)
    return find_device("cpu").decoder(model, store.form, 1200, 2, None)


def test_schemes_are_timed(decoder: Decoder) -> None:
    specs = CacheSpec.parse_list("dense,planes,onebit,kivi2")
    timings = bench(decoder, specs, [300], tokens=8)
    assert not vars(decoder).keys() & set(MATMUL_METHODS)
    assert [t.kv for t in timings] == [str(spec) for spec in specs]
    for t in timings:
        assert (t.depth, t.tokens) == (300, 8)
        assert t.token_ms > 2 * t.attention_ms_layer > 0 < t.matmul_ms < t.token_ms_p95
        assert t.gb_per_s == pytest.approx(t.bytes_read_layer / t.attention_ms_layer / 1e6)
        assert 0 < t.bytes_read_layer <= t.cache_bytes
    (result,) = bench_prefill(decoder, specs[:1], [300])
    assert 0 < result.matmul_s < result.seconds == pytest.approx(300 / result.tokens_per_s)


@pytest.mark.parametrize("name", ["planes", "h2o"])
def test_a_copied_cache_is_a_filled_one(name: str, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters, what was fitted, and every array of every layer."""
    states = []
    for copies in (True, False):
        if not copies:
            monkeypatch.setattr(SchemeTimer, "_first_of_layout", lambda timer: timer.caches)
        monkeypatch.setattr(SchemeTimer, "decode", lambda timer, n: None)
        states.append([cache.state() for cache in SchemeTimer(decoder, CacheSpec.parse(name), 300, 8).caches])
    for copied, filled in zip(*states, strict=True):
        assert copied.counters == filled.counters
        assert str(copied.extra) == str(filled.extra)
        for array, expected in copied.arrays.items():
            np.testing.assert_array_equal(expected, filled.arrays[array])


def test_bench_writes_every_timing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    out = tmp_path / "bench.json"
    options = "tiny --layers 1 --weights int4 --kv dense,kivi2 --depth 0,300 --tokens 1 --prefill 64 --json"
    assert "kivi2" in cli("bench", *options.split(), out).out
    facts = json.loads(out.read_text())
    assert [(t["kv"].partition(":")[0], t["depth"]) for t in facts["timings"]] == [
        (kv, depth) for depth in (0, 300) for kv in ("dense", "kivi2")
    ]
    assert facts["settings"]["layers"] == 1
    assert facts["prefill"][0]["tokens"] == 64


def test_what_the_demo_shows(cli: Cli) -> None:
    """Two schemes find all five facts; the third forgets what lies before the latest tokens."""
    said = cli("demo", "--ctx", "1100", "--seed", "3", "--kv", "kivi2,streaming:budget=64")
    assert 9 <= len(re.findall(r"\d{5} found", said.out)) <= 12  # of f16 and kivi2 10


BAD = {
    "eval --gate --text short.txt": "too few to gate",
    "eval --gate --text short.txt --kv dense": "needs no gate",
    "eval --gate --text short.txt --max-kl=0": "--max-kl",
    "eval --gate --text short.txt --min-needles=nan": "--min-needles",
    "eval --text - --plot /no/folder/x.png": "cannot be written",
    "bench --shape llama9": "no such shape",
    "bench --depth 1,x --shape tiny": "--depth",
    "bench --layers 2": "--shape",
    "bench demo --depth 900000": "--depth 900000: accepted: numbers up to ",
    "demo --ctx 100": "1024 to",
}


def test_bad_input_is_one_line(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("It was a dark night.")
    for command, blamed in BAD.items():
        assert blamed in cli(*command.split(), status=2).err
