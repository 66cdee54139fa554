"""The gate: verdicts by the limits, needles only where dense finds them, and what is remembered and warned of."""

import dataclasses
import io
import json
import pathlib
import re
import shutil
import sys

import golden_cases
import numpy as np
import pytest
from helpers import SCHEMES, UNBOUND
from safetensors.numpy import save_file

from edgekv import Session
from edgekv.checkpoint.checkpoint import open_checkpoint
from edgekv.checkpoint.shipped import shipped_model
from edgekv.checkpoint.tensors import to_float32
from edgekv.cli import main
from edgekv.engine.decoder import Decoder
from edgekv.engine.loading import find_device
from edgekv.engine.model import Model
from edgekv.engine.verdicts import Verdicts, needs_gate
from edgekv.errors import CheckpointError, ContextError
from edgekv.eval.evaluate import Quality, evaluate
from edgekv.eval.gate import (
    DEFAULT_SCHEMES,
    GateLimits,
    Verdict,
    default_ctx,
    gate,
    judge,
    recommended,
)
from edgekv.eval.needles import NeedleTest, Prose, answers, make_haystack
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.tiered import Steps, StepsKnobs
from edgekv.models import architecture
from edgekv.text import Tokenizer, load_tokenizer

ROOT = pathlib.Path(__file__).resolve().parent.parent


SENTENCES = (
    "He went to the town, and the rain fell on the road.",
    '"Who is there?" she said, and there was no answer.',
    "It was late in the evening, and nobody had seen the boat.",
    "The old man looked at the fire for a long time.",
)
QUALITY = Quality(
    kv=str(CacheSpec.parse("onebit")),
    tokens=1024,
    perplexity=20.0,
    perplexity_ratio=1.0,
    kl=0.01,
    kl_second_half=0.01,
    top1=0.95,
    top1_second_half=0.95,
    cache_bytes=100,
    bytes_read_per_token=100,
    seconds=1.0,
    notes=(),
)


@pytest.fixture(scope="module")
def prose_text() -> str:
    order = np.random.default_rng(0).integers(len(SENTENCES), size=300)
    return " ".join(SENTENCES[i] for i in order)


def opened(path: pathlib.Path, ctx: int) -> tuple[Decoder, Tokenizer]:
    model = Model.open(path)
    tokenizer = load_tokenizer(model.tokenizer_path, config=model.raw_config)
    return find_device("cpu").decoder(model, model.weight_format("f32"), ctx, 2, None), tokenizer


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Tokenizer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "xdg"))
        return opened(shipped_model("demo"), 1024)


@pytest.fixture
def own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Where the gates of this test alone are remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "edgekv" / "gates"


def model_of(tmp_path: pathlib.Path) -> Model:
    return Model.open(golden_cases.write_checkpoint("llama31", tmp_path / "model"))


def test_a_perplexity_by_hand(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token's probability after those before it in its window; those after the first token of one alone."""
    monkeypatch.setattr("edgekv.eval.evaluate.LOGIT_ROWS", 7)  # several pieces, and a rest
    exact, ctx = "dense:dtype=f32", 24
    path, tokens = golden_cases.write_checkpoint("llama31", tmp_path), golden_cases.tokens("llama31")
    session = Session.load(path, kv=exact, weights="f32")
    losses = []
    for window in (tokens[:ctx], tokens[ctx : 2 * ctx]):
        session.reset()
        logits = session.logits(window).astype(float)
        for i, following in enumerate(window[1:]):
            losses.append(np.log(np.exp(logits[i]).sum()) - logits[i, following])
    specs = [CacheSpec.parse(exact), CacheSpec.parse("kivi2:residual_length=0")]
    plain, lossy = evaluate(session._runner.decoder, tokens, ctx, specs)
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


@pytest.mark.parametrize("case", MISSED)
def test_a_verdict_names_every_limit_that_was_missed(case: str) -> None:
    changes, needles, failures = MISSED[case]
    verdict = judge(dataclasses.replace(QUALITY, **changes), needles, GateLimits())
    assert verdict.failures == failures
    assert verdict.passed == (not failures)


def test_limits_are_the_users() -> None:
    assert not judge(QUALITY, None, GateLimits(max_kl=0.001)).passed
    assert judge(dataclasses.replace(QUALITY, kl=0.4), None, GateLimits(max_kl=0.5)).passed
    assert judge(QUALITY, (10, 20), GateLimits(min_needles=0.5)).passed


def test_the_smallest_cache_that_passed_is_recommended() -> None:
    sizes = {"large": 300, "small": 200, "failed": 100}
    verdicts = [
        Verdict(dataclasses.replace(QUALITY, kv=name, cache_bytes=size), None, ("KL",) * (name == "failed"))
        for name, size in sizes.items()
    ]
    assert recommended(verdicts).kv == "small"
    assert recommended(verdicts[2:]) is None


def test_what_needs_a_gate() -> None:
    exact = {"dense", "dense:dtype=f32", "visual1", "visual=planes"}
    assert {
        name for name in [*UNBOUND, "dense:dtype=f32", "dense:dtype=q8"] if not needs_gate(CacheSpec.parse(name))
    } == exact
    assert "q8" in DEFAULT_SCHEMES
    assert "f16" not in DEFAULT_SCHEMES


def test_the_window_fits_the_text_and_the_model() -> None:
    assert [default_ctx(n, 9216) for n in (512, 3000, 90_000)] == [512, 3000, 8192]
    assert default_ctx(90_000, 256) == 256
    with pytest.raises(ContextError, match="has 511 tokens"):
        default_ctx(511, 9216)


@pytest.mark.parametrize("name", [*(name for name in SCHEMES if name != "dense"), "onebit:v_bits=1", "q8"])
def test_short_names_mean_the_same_scheme(name: str) -> None:
    spec = CacheSpec.parse(name)
    assert spec.short == name
    assert CacheSpec.parse(str(spec)) == CacheSpec.parse(spec.short) == spec


def test_the_demo_is_gated_with_needles(demo: tuple[Decoder, Tokenizer], prose_text: str) -> None:
    decoder, tokenizer = demo
    specs = CacheSpec.parse_list("kivi2:bits=4,streaming:budget=64,h1b")
    verdicts, needle_test = gate(decoder, tokenizer, tokenizer.encode(prose_text), specs, 1024, n_needles=8)
    assert (needle_test.n_hidden, needle_test.n_known, needle_test.applies) == (8, 8, True)
    exact, forgetful, coarse = verdicts
    assert exact.passed
    assert exact.needles == (8, 8)
    assert forgetful.needles[0] <= 2  # those among the latest 64 tokens
    assert any(phrase.startswith("needles") for phrase in forgetful.failures)
    assert any(phrase.startswith("KL") for phrase in coarse.failures)


def test_every_question_is_asked_of_the_same_cache(demo: tuple[Decoder, Tokenizer], prose_text: str) -> None:
    """Also where the scheme has no way back: the order of the questions changes nothing."""
    decoder, tokenizer = demo
    prose = Prose(np.asarray(tokenizer.encode(prose_text, bos=False)), tokenizer)
    haystack = make_haystack(np.random.default_rng(2), prose, 768, 6)
    backwards = dataclasses.replace(haystack, questions=haystack.questions[::-1])
    spec = CacheSpec.parse("h2o:budget=256")
    right = answers(decoder, tokenizer, spec, haystack, 768)
    assert answers(decoder, tokenizer, spec, backwards, 768) == right[::-1]


def test_needles_that_dense_misses_are_not_held_against_a_scheme(shared: pathlib.Path, prose_text: str) -> None:
    """stories260K knows no pass keys: the part is not applicable, and nobody passes it."""
    decoder, tokenizer = opened(shared / "models" / "stories260K", 512)
    verdicts, needle_test = gate(
        decoder, tokenizer, tokenizer.encode(prose_text), [CacheSpec.parse("kivi2:bits=4")], 512, n_needles=5
    )
    assert not needle_test.applies
    assert needle_test.note == f"not applicable: the dense cache finds {needle_test.n_known} of 5"
    assert verdicts[0].needles is None


def test_without_needles(demo: tuple[Decoder, Tokenizer], prose_text: str) -> None:
    decoder, tokenizer = demo
    prose = Prose(np.asarray(tokenizer.encode(prose_text, bos=False)), tokenizer)
    assert not NeedleTest.make(decoder, tokenizer, prose, 512, n=0).applies
    assert "none were hidden in windows of 90 tokens" in NeedleTest.make(decoder, tokenizer, prose, 90).note


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The demo model as a Qwen2 whose keys are hardly anything but a bias, which few bits can't hold.

    It has 30 times a typical key's norm in the slowest rotary pair, at random signs: that turns so little that it
    adds nearly the same to all scores of a query.
    """
    source, folder, rng = (
        open_checkpoint(shipped_model("demo")),
        tmp_path_factory.mktemp("biased"),
        np.random.default_rng(0),
    )
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
    """Those with centres or ranges per channel survive; one scale per token does not, and the gate says so."""
    decoder, tokenizer = opened(biased, 1024)
    specs = CacheSpec.parse_list("planes:k_bits=4,v_bits=4,kivi2:bits=4,onebit,dense:dtype=q8,int4")
    verdicts, _ = gate(decoder, tokenizer, tokenizer.encode(prose_text), specs, 1024, n_needles=0)
    kl = {CacheSpec.parse(verdict.kv).short: verdict.quality.kl for verdict in verdicts}
    assert max(kl["q4"], kl["kivi2:bits=4"]) < 0.01
    assert kl["onebit"] < 0.05
    assert {CacheSpec.parse(v.kv).short for v in verdicts if not v.passed} >= {"q8", "int4"}


def test_a_verdict_is_remembered_with_what_it_was_measured_on(tmp_path: pathlib.Path) -> None:
    model, spec = model_of(tmp_path), CacheSpec.parse("onebit")
    gated = Verdicts(model, tmp_path / "gates")
    assert gated.verdict(spec) is None
    gated.remember(spec, Verdict(QUALITY, (20, 20), ("KL 1, more than 0.05",)), {"text": "book.txt"})
    remembered = Verdicts(model, tmp_path / "gates").verdict(spec)
    assert remembered["failures"] == ["KL 1, more than 0.05"]
    assert remembered["measured"] == {"text": "book.txt"}
    assert gated.verdict(CacheSpec.parse("onebit:v_bits=1")) is None
    (file,) = (tmp_path / "gates").rglob("*.*")
    assert file.parent.name == model.identity
    facts = json.loads(file.read_text())["content"]
    assert (facts["passed"], facts["quality"]["kl"], facts["needles"]) == (False, 0.01, [20, 20])


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"format": 0}', b"\xff"])
def test_a_damaged_memory_counts_as_none(content: bytes, tmp_path: pathlib.Path) -> None:
    gated, spec = Verdicts(model_of(tmp_path), tmp_path), CacheSpec.parse("onebit")
    gated.remember(spec, judge(QUALITY, None, GateLimits()), {})
    (file,) = gated.folder.iterdir()
    file.write_bytes(content or file.read_bytes().replace(b"0.01", b"0.02"))
    assert gated.verdict(spec) is None


def test_a_new_version_of_a_scheme_must_be_gated_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated, spec = Verdicts(model_of(tmp_path), tmp_path), CacheSpec.parse("onebit")
    gated.remember(spec, judge(QUALITY, None, GateLimits()), {})
    assert gated.warning(spec) is None
    monkeypatch.setattr(spec.scheme, "version", spec.scheme.version + 1)
    assert "was never gated" in gated.warning(spec)


def test_a_warning_is_given_once_and_again_after_a_failed_gate(tmp_path: pathlib.Path) -> None:
    model, spec = model_of(tmp_path), CacheSpec.parse("onebit:v_bits=1")
    gated = Verdicts(model, tmp_path / "gates")
    first = gated.warn_once(spec)
    assert first.startswith("kv='onebit:v_bits=1' was never gated for this model")
    assert first.endswith(f"edgekv eval --gate --model {model.path} --text YOUR-TEXT --kv onebit:v_bits=1")
    assert gated.warn_once(spec) is None
    assert gated.warn_once(CacheSpec.parse("onebit")) is not None
    gated.remember(spec, Verdict(QUALITY, None, ("KL 1, more than 0.05",)), {"text": "book.txt"})
    assert "failed its gate for this model on book.txt: KL 1, more than 0.05" in gated.warn_once(spec)
    assert gated.warn_once(spec) is None
    gated.remember(spec, Verdict(QUALITY, None, ()), {})
    assert gated.warning(spec) is None


def test_auto_takes_what_passed(tmp_path: pathlib.Path) -> None:
    gated = Verdicts(model_of(tmp_path), tmp_path / "gates")
    assert gated.passed() == []
    gated.remember(CacheSpec.parse("q3"), Verdict(QUALITY, None, ()), {})
    gated.remember(CacheSpec.parse("q2"), Verdict(QUALITY, None, ("KL 1, more than 0.05",)), {})
    assert gated.passed() == ["q3"]


def test_no_warning_for_what_needs_no_gate(tmp_path: pathlib.Path) -> None:
    gated = Verdicts(model_of(tmp_path), tmp_path)
    for name in ("dense", "dense:dtype=f32", "visual1", "visual=planes"):
        assert gated.warn_once(CacheSpec.parse(name)) is None


def test_a_budget_is_as_good_as_what_it_packs_in(tmp_path: pathlib.Path) -> None:
    gated, spec = Verdicts(model_of(tmp_path), tmp_path), CacheSpec(Steps, StepsKnobs(1 << 20))
    parts = [CacheSpec.parse(part).short for part in Steps.packs_like]
    assert gated.warning(spec).endswith(f"--kv {','.join(parts)}")
    for part in map(CacheSpec.parse, Steps.packs_like):
        gated.remember(part, judge(QUALITY, None, GateLimits()), {})
    assert gated.warning(spec) is None


def test_a_folder_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    (tmp_path / "gates").write_text("a file")
    gated, spec = Verdicts(model_of(tmp_path), tmp_path / "gates"), CacheSpec.parse("onebit")
    assert all("never gated" in gated.warn_once(spec) for _ in range(2))
    with pytest.raises(CheckpointError, match="set XDG_CACHE_HOME"):
        gated.remember(spec, judge(QUALITY, None, GateLimits()), {})


def test_on_the_command_line(
    own_cache: pathlib.Path, prose_text: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "book.txt").write_text(prose_text)
    command = ["eval", "--gate", "--text", str(tmp_path / "book.txt"), "--ctx", "512", "--needles", "5"]
    assert main([*command, "--kv", "kivi2:bits=4,streaming:budget=64", "--json", str(tmp_path / "gate.json")]) == 0
    out = capsys.readouterr().out
    assert "needles: the dense cache finds 5 of 5" in out
    assert "recommended: --kv kivi2:bits=4 (the smallest cache that passed" in out.splitlines()[-1]
    facts = json.loads((tmp_path / "gate.json").read_text())
    assert [verdict["passed"] for verdict in facts["verdicts"]] == [True, False]
    assert facts["recommended"] == "kivi2:bits=4"
    assert facts["settings"]["ctx"] == 512
    assert len(list(own_cache.rglob("*.json"))) == 2
    assert main([*command, "--kv", "streaming:budget=64"]) == 1
    assert "recommended: --kv dense (no scheme passed)" in capsys.readouterr().out
    errors = []
    for kv in ("kivi2:bits=4", "streaming:budget=64", "streaming:budget=64", "streaming", "dense"):
        assert main(["run", "--prompt", "It was", "--max-new-tokens", "1", "--kv", kv]) == 0
        errors.append([line for line in capsys.readouterr().err.splitlines() if line.startswith("edgekv: ")])
    assert [len(lines) for lines in errors] == [0, 1, 0, 1, 0]
    assert "failed its gate for this model on book.txt" in errors[1][0]
    assert "was never gated" in errors[3][0]


def test_chat_warns_too(
    own_cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jinja2")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    for n in (1, 0):
        assert main(["chat", "--kv", "kivi2:bits=4", "--ctx", "64"]) == 0
        assert capsys.readouterr().err.count("was never gated for this model") == n


BAD = {
    "short": ([], "too few to gate"),
    "exact": (["--kv", "dense"], "needs no gate"),
    "plot": (["--plot", "x.png"], "leave one of them out"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_are_one_line(name: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_text("It was a dark night.")
    arguments, message = BAD[name]
    assert main(["eval", "--gate", "--text", str(tmp_path / "short.txt"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "option", ["--max-kl=0", "--max-kl=much", "--min-top1=1.5", "--min-needles=nan", "--needles=-1"]
)
def test_limits_out_of_range(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["eval", "--gate", "--text", "x", option])
    assert re.search("is not a (whole )?number", capsys.readouterr().err)
