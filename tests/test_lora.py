"""LoRAs: merged as PEFT merges them, known by stores and sessions, refused where they can't be merged."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import golden_cases
import lora_cases
import numpy as np
import packed_cases
import pytest
from checkpoint_files import one_line
from kernel_cases import pairs
from safetensors.numpy import load_file, save_file

from edgekv import Session
from edgekv.cli import main
from edgekv.engine.model import Model
from edgekv.errors import CheckpointError, ConfigError, EdgeKVError, SessionError
from edgekv.weights.formats import WEIGHTS

GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "lora.npz")
CASE = lora_cases.CASES["llama"]
TOKENS = golden_cases.tokens(CASE.model)
Q_PROJ = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight"

FAMILIES = ("qwen3", "gemma3", "olmo2", "ministral3", "lfm2-options", "qwen3_5")
AddCase = Callable[[str, dict[str, Any], tuple[str, ...]], None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return golden_cases.write_checkpoint(CASE.model, tmp_path_factory.mktemp("base"))


@pytest.fixture
def lora(tmp_path: pathlib.Path) -> pathlib.Path:
    return lora_cases.write("llama", tmp_path / "helper")


def logits(model: pathlib.Path, lora: Any, device: str = "numpy", weights: str = "f32") -> np.ndarray:
    with Session.load(model, lora=lora, weights=weights, kv="dense:dtype=f32", device=device) as session:
        return session.logits(TOKENS)


@pytest.fixture
def add_case(monkeypatch: pytest.MonkeyPatch) -> AddCase:
    """Names a model's config, and a LoRA of rank 1 on modules whose names end so, with alpha 4."""

    def add(name: str, config: dict[str, Any], modules: tuple[str, ...]) -> None:
        monkeypatch.setitem(golden_cases.CASES, name, config)
        case = lora_cases.LoraCase(name, modules, {"r": 1, "lora_alpha": 4})
        monkeypatch.setitem(lora_cases.CASES, name, case)

    return add


def changed(lora: pathlib.Path, change: Callable[[dict[str, np.ndarray]], None]) -> pathlib.Path:
    """The folder with its tensors changed in place."""
    path = lora / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return lora


@pytest.mark.parametrize(("name", "device"), pairs(name=list(lora_cases.CASES), device=["numpy", "cpu"]))
def test_logits_are_those_of_peft(name: str, device: str, tmp_path: pathlib.Path) -> None:
    """Which are not the base model's."""
    case = lora_cases.CASES[name]
    model = golden_cases.write_checkpoint(case.model, tmp_path / "base")
    given = f"{lora_cases.write(name, tmp_path / 'lora')}:{case.scale}"
    with Session.load(model, lora=given, weights="f32", kv="dense:dtype=f32", device=device) as session:
        found = session.logits(golden_cases.tokens(case.model))[::3]
    np.testing.assert_allclose(found, GOLDEN[name], atol=2e-4, rtol=0)
    plain = np.load(pathlib.Path(__file__).parent / "golden" / "logits.npz")[case.model]
    assert np.abs(GOLDEN[name] - plain).max() > 0.3


def test_quantized_weights_are_those_of_the_merged_checkpoint(base: pathlib.Path, lora: pathlib.Path) -> None:
    """Merged before it is rounded: the codes are those of a checkpoint into which NumPy merged it."""
    tensors, changes = golden_cases.tensors(CASE.model), lora_cases.tensors("llama")
    for name in [name for name in changes if ".lora_A." in name]:
        target = name.removeprefix("base_model.model.").replace(".lora_A", "")
        tensors[target] = tensors[target] + changes[name.replace("_A", "_B")] @ changes[name] * np.float32(0.5 * 2)
    merged = lora.parent / "merged"
    merged.mkdir()
    save_file(tensors, merged / "model.safetensors")
    (merged / "config.json").write_text(json.dumps(golden_cases.CASES[CASE.model]))
    models = Model.open(base, lora=f"{lora}:0.5"), Model.open(merged)
    stores = [model.store(WEIGHTS["int8"]) for model in models]
    for name in stores[0].arch.linears():
        np.testing.assert_allclose(stores[0].matrix(name), stores[1].matrix(name), atol=1e-2)
        assert np.mean(stores[0].raw(f"{name}.codes") != stores[1].raw(f"{name}.codes")) < 1e-3


def test_each_lora_and_scale_has_an_identity(base: pathlib.Path, lora: pathlib.Path) -> None:
    """So that their weight stores are not mixed."""
    other = lora_cases.write("llama", lora.parent / "other")
    copied = Model.open(base, lora=other).identity
    alpha = Model.open(base, lora=lora_cases.write("llama", lora.parent / "alpha", lora_alpha=9)).identity
    changed(other, lambda tensors: tensors.update({Q_PROJ.format("B"): tensors[Q_PROJ.format("B")] + 1}))
    given = (None, lora, f"{lora}:0.5", f"{lora}:-1", other)
    assert len({alpha, *(Model.open(base, lora=each).identity for each in given)}) == 6
    assert Model.open(base, lora=f"{lora}:1.0").identity == Model.open(base, lora=lora).identity == copied


def test_saved_sessions_belong_to_their_lora(base: pathlib.Path, lora: pathlib.Path) -> None:
    saved = lora.parent / "session"
    with Session.load(base, lora=f"{lora}:0.5", weights="f32", device="numpy") as session:
        session.prefill(TOKENS[:20])
        session.save(saved)
        expected = [step.token for step in session.generate(TOKENS[20:24], max_new_tokens=3, temperature=0.0)]
        assert session.report().settings["lora"].startswith("helper:0.5 (")
    with Session.restore(saved, base, lora=f"{lora}:0.5", device="numpy") as session:
        steps = session.generate(TOKENS[20:24], max_new_tokens=3, temperature=0.0)
        assert [step.token for step in steps] == expected
    for other in (lora, None):
        with pytest.raises(SessionError) as error:
            Session.restore(saved, base, lora=other, device="numpy")
        assert error.value.field == "lora"
        given = "no LoRA" if other is None else "the LoRA helper:1 ("
        one_line(error, "the LoRA helper:0.5 (", given, "`lora`")


@pytest.mark.parametrize("name", ["gptq-32", "fp8"])
def test_a_packed_checkpoint_is_merged_unpacked(name: str, tmp_path: pathlib.Path, add_case: AddCase) -> None:
    """What the packed numbers stand for plus the change, and the layers without one as they are."""
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
def test_every_family_takes_a_lora_on_all_its_projections(
    name: str, tmp_path: pathlib.Path, add_case: AddCase
) -> None:
    model = golden_cases.write_checkpoint(name, tmp_path / "model")
    add_case("all", golden_cases.CASES[name], ("proj", "w1", "w2", "w3", "proj_qkv", "proj_z", "proj_b", "proj_a"))
    plain, merged = Model.open(model), Model.open(model, lora=lora_cases.write("all", tmp_path / "lora"))
    for linear in set(plain.arch.linears()) - {"head"}:
        assert (plain.weights.matrix(linear) != merged.weights.matrix(linear)).mean() > 0.9


def test_a_store_is_made_with_a_lora_and_takes_none(base: pathlib.Path, lora: pathlib.Path) -> None:
    out = lora.parent / "store"
    command = ["quantize", "--model", str(base), "--weights", "f32", "--output", str(out)]
    assert main([*command, "--lora", f"{lora}:0.5"]) == 0
    np.testing.assert_array_equal(logits(out, None), logits(base, f"{lora}:0.5"))
    with pytest.raises(ConfigError) as error:
        Model.open(out, lora=lora)
    one_line(error, lora, out, "is a store", "original checkpoint", "no `lora`")


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model."])
def test_a_lora_of_another_wrapping_of_the_model_fits(prefix: str, base: pathlib.Path, lora: pathlib.Path) -> None:
    """AutoModel has no prefix. A name that no wrapping has is refused."""
    expected = Model.open(base, lora=lora).weights.matrix("2.down")

    def rename(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[name.replace(".model.model.", f".model.{prefix}", 1)] = tensors.pop(name)

    changed(lora, rename)
    if prefix == "model.language_model.":
        with pytest.raises(ConfigError) as error:
            Model.open(base, lora=lora)
        one_line(error, "is no linear layer of this llama model", "down_proj")
    else:
        np.testing.assert_array_equal(Model.open(base, lora=lora).weights.matrix("2.down"), expected)


def test_what_a_merge_would_get_wrong_is_refused_by_name(base: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for changes, parts in (
        ({"use_dora": True}, ["use_dora is True", "accepted: none"]),
        ({"modules_to_save": ["lm_head"]}, ["modules_to_save", "lm_head"]),
        ({"bias": "lora_only"}, ["bias is 'lora_only'", "none"]),
        ({"peft_type": "LOHA"}, ["peft_type", "LOHA", "LORA"]),
        ({"init_lora_weights": "pissa_niter_4"}, ["pissa", "path_initial_model_for_weight_conversion"]),
        ({"r": 0}, ["r is 0"]),
        ({"r": 5}, ["ranks 4 and 4", "says 5"]),
        ({"lora_alpha": float("nan")}, ["not finite"]),
        ({"lora_alpha": None, "alpha_pattern": {"(a+)+b": 3}}, ["alpha_pattern", "(a+)+b"]),
    ):
        lora = lora_cases.write("llama", tmp_path / "lora", **changes)
        with pytest.raises(EdgeKVError) as error:
            Model.open(base, lora=lora)
        one_line(error, lora, *parts)


A, B = (Q_PROJ.format(half) for half in "AB")


def _nan(a: np.ndarray) -> np.ndarray:
    a = a.copy()
    a[1, 2] = np.nan
    return a


DAMAGES: tuple[tuple[Callable[[dict[str, np.ndarray]], Any], tuple[str, ...]], ...] = (
    (lambda t: t.update({A: _nan(t[A])}), (A[:50], "not finite")),
    (lambda t: t.pop(A), ("without its other half",)),
    (lambda t: t.update({A: t[A].astype(np.int8)}), ("I8",)),
    (lambda t: t.update({A: t[A].ravel()}), ("(256,)",)),
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
        with pytest.raises(EdgeKVError) as error:
            Model.open(base, lora=lora)
        assert error.value.field == "lora"
        one_line(error, lora, *parts)


def test_a_change_that_overflows_is_refused_while_it_is_merged(base: pathlib.Path, lora: pathlib.Path) -> None:
    model = Model.open(
        base, lora=changed(lora, lambda t: t.update({each: np.full_like(t[each], 3e38) for each in (A, B)}))
    )
    with pytest.raises(CheckpointError, match="is not finite with the LoRA"):
        model.weights.matrix("1.qkv")


def test_models_and_places_that_are_refused(base: pathlib.Path, lora: pathlib.Path) -> None:
    tied = golden_cases.write_checkpoint("llama-tied-smollm", lora.parent / "base")
    with pytest.raises(ConfigError) as error:  # the head's tensor is the embedding's too, which PEFT leaves
        Model.open(tied, lora=lora_cases.write("llama-patterns", lora.parent / "lora"))
    one_line(error, "'lm_head'", "embedding")
    for scale in ("x", "nan", ""):
        with pytest.raises(ConfigError) as error:
            Model.open(base, lora=f"{lora}:{scale}")
        assert error.value.field == "lora"
        one_line(error, "FOLDER:scale")
    with pytest.raises(ConfigError, match=r"holds no adapter_config\.json"):
        Model.open(base, lora=lora.parent)
    (lora / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no adapter_model\.safetensors"):
        Model.open(base, lora=lora)
