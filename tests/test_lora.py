"""LoRAs, merged and beside the weights: PEFT's numbers, identities, what is refused; conversations never mix."""

import functools
import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import golden_cases
import lora_cases
import numpy as np
import packed_cases
import pytest
import tiny_models
from helpers import Cli, raises, text
from kernel_cases import pairs
from safetensors.numpy import load_file, save_file
from serving import open_endpoints
from slot_cases import Recorded, at_once

from edgekv import LoadOptions, SamplingParams, Session
from edgekv.engine.cuda import CudaBackend
from edgekv.engine.loading import Options
from edgekv.engine.model import Model
from edgekv.errors import CheckpointError, ConfigError, EdgeKVError, SessionError
from edgekv.kvcache import CacheSpec
from edgekv.server.engine import SessionPool

GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "lora.npz")
CASE = lora_cases.CASES["llama"]
TOKENS = golden_cases.tokens(CASE.model)
Q_PROJ = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight"

FAMILIES = ("gemma3", "lfm2-options", "qwen3_5")
AddCase = Callable[[str, dict[str, Any], tuple[str, ...]], None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return golden_cases.write_checkpoint(CASE.model, tmp_path_factory.mktemp("base"))


@pytest.fixture
def lora(tmp_path: pathlib.Path) -> pathlib.Path:
    return lora_cases.write("llama", tmp_path / "helper")


@pytest.fixture
def add_case(monkeypatch: pytest.MonkeyPatch) -> AddCase:
    """Names a model's config, and a LoRA of rank 1 on modules whose names end so, with alpha 4."""

    def add(name: str, config: dict[str, Any], modules: tuple[str, ...]) -> None:
        monkeypatch.setitem(golden_cases.CASES, name, config)
        case = lora_cases.LoraCase(name, modules, {"r": 1, "lora_alpha": 4})
        monkeypatch.setitem(lora_cases.CASES, name, case)

    return add


def changed(lora: pathlib.Path, change: Callable[[dict[str, np.ndarray]], None]) -> pathlib.Path:
    """Changes tensors of the folder in place."""
    path = lora / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return lora


@pytest.mark.parametrize(("name", "device"), pairs(name=list(lora_cases.CASES), device=["numpy", "cpu"]))
def test_logits_are_those_of_peft(name: str, device: str, tmp_path: pathlib.Path) -> None:
    """Merged and beside the weights; without it they are those of the model alone."""
    case = lora_cases.CASES[name]
    model, tokens = golden_cases.write_checkpoint(case.model, tmp_path / "base"), golden_cases.tokens(case.model)
    given = f"{lora_cases.write(name, tmp_path / 'lora')}:{case.scale}"
    options = LoadOptions(weights="f32", kv="dense:dtype=f32", device=device)
    merged, plain = Session.load(model, **options, lora=given), Session.load(model, **options)
    beside = Session.load(model, **options, loras={"own": given})
    np.testing.assert_array_equal(beside.logits(tokens), plain.logits(tokens))
    beside.use_lora("own")
    for session in (merged, beside):
        np.testing.assert_allclose(session.logits(tokens)[::3], GOLDEN[name], atol=2e-4, rtol=0)


def test_each_lora_and_scale_has_an_identity(base: pathlib.Path, lora: pathlib.Path) -> None:
    """So that their weight stores are not mixed."""
    other = lora_cases.write("llama", lora.parent / "other")
    copied = Model.open(base, lora=other).identity
    alpha = Model.open(base, lora=lora_cases.write("llama", lora.parent / "alpha", lora_alpha=9)).identity
    changed(other, lambda tensors: tensors.update({Q_PROJ.format("B"): tensors[Q_PROJ.format("B")] + 1}))
    given = (None, lora, f"{lora}:0.5", f"{lora}:-1", other)
    assert len({alpha, *(Model.open(base, lora=each).identity for each in given)}) == 6
    assert Model.open(base, lora=f"{lora}:1.0").identity == Model.open(base, lora=lora).identity == copied


@pytest.mark.parametrize("name", ["gptq-32", "fp8"])
def test_a_packed_checkpoint_is_merged_unpacked(name: str, tmp_path: pathlib.Path, add_case: AddCase) -> None:
    """The packed numbers' values get the change; layers without one stay as they are."""
    packed, _ = packed_cases.write(name, tmp_path)
    add_case("packed", json.loads((packed / "config.json").read_text()), ("v_proj",))
    lora = lora_cases.write("packed", tmp_path / "lora")
    plain, merged = Model.open(packed), Model.open(packed, lora=lora)
    changes = lora_cases.tensors("packed")
    a, b = (changes[f"base_model.model.model.layers.0.self_attn.v_proj.lora_{half}.weight"] for half in "AB")
    difference = merged.weights.matrix("0.qkv") - plain.weights.matrix("0.qkv")
    np.testing.assert_allclose(difference[-len(b) :], 4 * b @ a, atol=1e-5)
    assert not difference[: -len(b)].any()
    forms = [model.weight_format("auto").of for model in (plain, merged)]
    assert (forms[1]("0.qkv").name, forms[1]("0.down").name) == ("int8-32", forms[0]("0.down").name)
    assert "a second time" in str(merged.weights_note(merged.weight_format("auto")))
    merged.store(merged.weight_format("auto"))


@pytest.mark.parametrize("name", FAMILIES)
def test_families_take_a_lora_on_all_projections(name: str, tmp_path: pathlib.Path, add_case: AddCase) -> None:
    model = golden_cases.write_checkpoint(name, tmp_path / "model")
    add_case("all", golden_cases.CASES[name], ("proj", "w1", "w2", "w3", "proj_qkv", "proj_z", "proj_b", "proj_a"))
    plain, merged = Model.open(model), Model.open(model, lora=lora_cases.write("all", tmp_path / "lora"))
    for linear in set(plain.arch.linears()) - {"head"}:
        assert (plain.weights.matrix(linear) != merged.weights.matrix(linear)).mean() > 0.9


def test_a_store_is_made_with_a_lora_and_takes_none(base: pathlib.Path, lora: pathlib.Path, cli: Cli) -> None:
    out = lora.parent / "store"
    command = ["quantize", "--model", str(base), "--weights", "f32", "--output", str(out)]
    cli(*command, "--lora", f"{lora}:0.5")
    stored = Session.load(out, weights="f32").logits(TOKENS)
    merged = Session.load(base, lora=f"{lora}:0.5", weights="f32").logits(TOKENS)
    np.testing.assert_array_equal(stored, merged)
    with raises(ConfigError, lora, out, "is a store", "original checkpoint", "no `lora`"):
        Model.open(out, lora=lora)


def test_a_lora_of_another_wrapping_of_the_model_fits(base: pathlib.Path, lora: pathlib.Path) -> None:
    """AutoModel has no prefix. A name that no wrapping has is refused."""
    expected, old = Model.open(base, lora=lora).weights.matrix("2.down"), ".model.model."
    for new in (".model.", ".model.model.language_model."):
        changed(lora, lambda t: [t.update({n.replace(old, new, 1): t.pop(n)}) for n in list(t)])  # noqa: B023
        old = new
        if new == ".model.":
            np.testing.assert_array_equal(Model.open(base, lora=lora).weights.matrix("2.down"), expected)
    with raises(ConfigError, "is no linear layer of this llama model", "down_proj"):
        Model.open(base, lora=lora)


def test_what_a_merge_would_get_wrong_is_refused_by_name(base: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for changes, parts in (
        ({"use_dora": True}, ["use_dora is True", "accepted: none"]),
        ({"modules_to_save": ["lm_head"]}, ["modules_to_save", "lm_head"]),
        ({"bias": "lora_only"}, ["bias is 'lora_only'", "none"]),
        ({"init_lora_weights": "pissa_niter_4"}, ["pissa", "path_initial_model_for_weight_conversion"]),
        ({"r": 5}, ["ranks 4 and 4", "says 5"]),
        ({"lora_alpha": float("nan")}, ["not finite"]),
        ({"lora_alpha": None, "alpha_pattern": {"(a+)+b": 3}}, ["alpha_pattern", "(a+)+b"]),
    ):
        lora = lora_cases.write("llama", tmp_path / "lora", **changes)
        with raises(EdgeKVError, lora, *parts):
            Model.open(base, lora=lora)


A, B = (Q_PROJ.format(half) for half in "AB")


DAMAGES: tuple[tuple[Callable[[dict[str, np.ndarray]], Any], tuple[str, ...]], ...] = (
    (lambda t: t.update({A: np.full_like(t[A], np.nan)}), (A[:50], "not finite")),
    (lambda t: t.pop(A), ("without its other half",)),
    (lambda t: t.update({A: t[A].astype(np.int8)}), ("I8",)),
    (lambda t: t.update({A: np.ones((4, 65), np.float32)}), ("(64, 65)", "(64, 64)")),
    (lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": t[A]}), ("lora_embedding_A",)),
    (lambda t: t.update({Q_PROJ.format("magnitude_vector"): t[A]}), ("neither lora_A nor lora_B",)),
    (
        lambda t: t.update({each.replace("model.model.model", "model.model"): t[each] for each in (A, B)}),
        ("same weight as another",),
    ),
    (dict.clear, ("holds no tensors",)),
)


def test_damaged_tensors_are_refused(base: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for i, (change, parts) in enumerate(DAMAGES):
        lora = changed(lora_cases.write("llama", tmp_path / str(i)), change)
        with raises(EdgeKVError, lora, *parts, field="lora"):
            Model.open(base, lora=lora)


def test_a_change_that_overflows_is_refused_while_it_is_merged(base: pathlib.Path, lora: pathlib.Path) -> None:
    model = Model.open(
        base, lora=changed(lora, lambda t: t.update({each: np.full_like(t[each], 3e38) for each in (A, B)}))
    )
    with pytest.raises(CheckpointError, match="is not finite with the LoRA"):
        model.weights.matrix("1.qkv")


def test_models_and_places_that_are_refused(base: pathlib.Path, lora: pathlib.Path) -> None:
    tied = golden_cases.write_checkpoint("llama-tied-smollm", lora.parent / "base")
    with raises(ConfigError, "'lm_head'", "embedding"):  # one tensor is both: PEFT leaves the embedding
        Model.open(tied, lora=lora_cases.write("llama-patterns", lora.parent / "lora"))
    for scale in ("x", "nan", ""):
        with raises(ConfigError, "FOLDER:scale", field="lora"):
            Model.open(base, lora=f"{lora}:{scale}")
    with pytest.raises(ConfigError, match=r"holds no adapter_config\.json"):
        Model.open(base, lora=lora.parent)
    (lora / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no adapter_model\.safetensors"):
        Model.open(base, lora=lora)


# Beside the weights


@pytest.fixture(scope="module")
def two_loras(base: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Session:
    """Returns a session of a model with two LoRAs."""
    lora = lora_cases.write("llama", tmp_path_factory.mktemp("lora") / "helper")
    return Session.load(base, loras={"one": lora, "half": f"{lora}:0.5"}, weights="f32", ctx=64)


def with_lora(session: Session, name: str | None) -> Session:
    """A conversation of its own."""
    fork = session.fork()
    fork.use_lora(name)
    return fork


def test_quantized_weights_stay_as_they_are(
    base: pathlib.Path, lora: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model and all its LoRAs share a store, whose values get each change."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = LoadOptions(weights="q4", kv="dense:dtype=f32")
    session = Session.load(base, **options, loras={"one": lora, "half": f"{lora}:0.5"})
    np.testing.assert_array_equal(session.logits(TOKENS), Session.load(base, **options).logits(TOKENS))
    assert len(list((tmp_path / "edgekv" / "stores").iterdir())) == 1
    exact = Session.load(base, **options, loras={"half": f"{lora}:0.5"}, device="numpy")
    found = []
    for each in (session, exact):
        each.use_lora("half")
        found.append(each.logits(TOKENS))
    assert np.sqrt(np.mean(np.square(found[0] - found[1]))) < 0.05 * found[1].std()  # activations are rounded, too


def test_a_conversation_is_of_one_lora(two_loras: Session) -> None:
    plain, one, half = (with_lora(two_loras, name) for name in (None, "one", "half"))
    texts = [text(session, TOKENS[:20]) for session in (plain, one, half)]
    assert len({tuple(each) for each in texts}) == 3
    assert (plain.lora, one.lora, one.fork().lora) == (None, "one", "one")
    assert one.report().settings["lora"].startswith("helper:1 (")
    assert "beside the weights" in one.report().settings["lora"]
    changes = sum(array.nbytes for array in lora_cases.tensors("llama").values())
    assert one.report().bytes_read_per_token - plain.report().bytes_read_per_token == changes
    with pytest.raises(SessionError, match="LoRA"):
        plain.copy_from(one)
    one.use_lora("half")
    assert not one.tokens
    assert text(one, TOKENS[:20]) == texts[2]
    with raises(ConfigError, "'none'", "one", "half"):
        one.use_lora("none")


def test_saved_sessions_go_on_with_their_own(
    two_loras: Session, base: pathlib.Path, lora: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    saved, one = tmp_path / "s.ekv", with_lora(two_loras, "one")
    one.prefill(TOKENS[:20])
    one.save(saved)
    expected = text(one, TOKENS[20:24])
    options = LoadOptions(weights="f32", loras={"another-name": lora, "half": f"{lora}:0.5"})
    for session in (Session.restore(saved, base, **options), Session.restore(saved, two_loras)):
        assert text(session, TOKENS[20:24]) == expected
    other = with_lora(two_loras, "half")
    other.load_state(saved)
    assert other.lora == "one"
    assert text(other, TOKENS[20:24]) == expected
    for given in ({}, {"half": f"{lora}:0.5"}):
        with raises(SessionError, "the LoRA helper:1 (", "beside the weights", "no LoRA"):
            Session.restore(saved, base, weights="f32", loras=given)


def test_several_decode_together(base: pathlib.Path, lora: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each LoRA has passes of its own."""
    session = Session.load(base, loras={"one": lora, "half": f"{lora}:0.5"}, weights="f32", slots=4, ctx=64)
    names = ("one", None, "half", "one")
    expected = [text(with_lora(session, name), TOKENS[:n]) for n, name in enumerate(names, 5)]
    assert len({tuple(each) for each in expected}) == 4
    passes = [Recorded(with_lora(session, name), monkeypatch) for name in (None, "one", "half")]
    works = [functools.partial(text, with_lora(session, name), TOKENS[:n]) for n, name in enumerate(names, 5)]
    assert at_once(works) == expected
    assert [sum(each.rows) for each in passes] == [11, 22, 11]


def test_what_one_has_read_is_not_anothers(two_loras: Session) -> None:
    """Conversations of the server's pool are apart, also where there is one session for all."""
    prompt = TOKENS[:40]
    expected = {name: text(with_lora(two_loras, name), prompt) for name in (None, "one", "half")}
    for room in (1, 8):
        pool = SessionPool(two_loras.fork(), room * two_loras.plan.cache_bytes)
        for name in (None, "one", "one", "half", None, "half", "one"):
            session, new = pool.acquire(prompt, name)
            assert session.lora == name
            assert text(session, list(new)) == expected[name]
            pool.release(session)
        assert pool.n_sessions <= room
    borrowed = pool.borrow("half")
    assert borrowed.lora == "half"
    assert borrowed.tokens[:40] == prompt


def test_what_does_not_fit_is_refused(base: pathlib.Path, lora: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for names in ({"": lora}, {"a b": lora}, {"x" * 65: lora}, {"a": 3}, [lora]):
        with raises(ConfigError, field="loras"):
            Options(loras=names)  # type: ignore[arg-type]
    other = golden_cases.write_checkpoint("llama1", tmp_path / "other")
    with raises(ConfigError, "k_proj", "(32, 64)", "(64, 64)", "trained on"):
        Session.load(other, loras={"one": lora})
    with raises(CheckpointError, "not finite", "scale"):
        Session.load(base, loras={"one": f"{lora}:1e300"}, weights="f32")
    with raises(ConfigError, "device='cpu'", "without a name"):
        CudaBackend.require(CacheSpec.parse("dense"), loras=True)


def test_a_server_has_several(base: pathlib.Path, lora: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A request chooses by the model's name, and nothing of another's cache comes into its answer."""
    tiny_models.write_tokenizer(shutil.copytree(base, tmp_path / "m"))
    session = Session.load(tmp_path / "m", loras={"mine": lora, "half": f"{lora}:0.5"}, weights="f32", slots=2)
    asks, expected, vectors = {"max_tokens": 8, "temperature": 0, "repetition_penalty": 1}, {}, {}
    for name in (None, "mine", "half"):
        own = with_lora(session, name)
        vectors[name or "demo"] = own.embed("It was a dark")
        steps = own.generate("It was a dark", max_new_tokens=8, sampling=SamplingParams(0.0))
        expected[name or "demo"] = "".join(step.text for step in steps)
    with open_endpoints(session, pool_bytes=1 << 20, queue_limit=8) as client:
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == [*expected]

        def text_of(name: str) -> str:
            body = {"prompt": "It was a dark", "model": name, **asks}
            answer = client.post("/v1/completions", json=body).json()
            assert answer["model"] == (name if name in expected else "demo")
            return str(answer["choices"][0]["text"])

        names = ["mine", "demo", "half", "half", "mine", "demo"]
        assert at_once([functools.partial(text_of, name) for name in names]) == [expected[name] for name in names]
        assert text_of("other") == expected["demo"]
        for name, vector in vectors.items():
            answer = client.post("/v1/embeddings", json={"input": "It was a dark", "model": name}).json()
            np.testing.assert_allclose(answer["data"][0]["embedding"], vector, atol=1e-5)
