"""Adapters: what they change, what they leave, what they refuse."""

import json
import pathlib
from typing import Any
from unittest import mock

import golden_cases
import numpy as np
import pytest
from helpers import Cli, raises
from safetensors.numpy import save_file

from edgekv import Session
from edgekv.checkpoint.adapter import Adapter
from edgekv.engine.model import Model
from edgekv.errors import CacheError, CheckpointError, ConfigError
from edgekv.weights.formats import ModelFormat

CASE = "llama31"  # 3 layers, 4 query heads
TOKENS = golden_cases.tokens(CASE)[:40]
V_PROJ = "model.layers.1.self_attn.v_proj.weight"
TAU = np.linspace(0.05, 0.5, 12, dtype=np.float32).reshape(3, 4)


def write(path: pathlib.Path, model: pathlib.Path, tensors: dict[str, Any], **metadata: str) -> pathlib.Path:
    known = {"format": "edgekv-adapter", "version": "1", "base": Model.open(model).identity, "scheme": "h1b"}
    save_file(tensors, path, metadata={**known, **metadata})
    return path


def changed_v_proj(case: str = CASE, name: str = V_PROJ) -> dict[str, np.ndarray]:
    return {name: golden_cases.tensors(case)[name] * np.float32(1.5) + np.float32(0.1)}


def logits(model: pathlib.Path, **settings: Any) -> np.ndarray:
    session = Session.load(model, weights="f32", **settings)
    return session.logits(TOKENS[:30])


@pytest.mark.parametrize("device", ["cpu", "numpy"])
def test_weights_are_an_edited_checkpoints(device: str, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    edited = tmp_path / "edited"
    edited.mkdir()
    save_file({**golden_cases.tensors(CASE), **changed_v_proj()}, edited / "model.safetensors")
    (edited / "config.json").write_text(json.dumps(golden_cases.CASES[CASE]))
    tau = np.full((), 0.2, np.float32)
    adapter = write(tmp_path / "adapter.safetensors", model, {"tau": tau, **changed_v_proj()})
    only_tau = write(tmp_path / "tau.safetensors", edited, {"tau": tau})
    adapted = logits(model, kv="h1b", device=device, adapter=adapter)
    np.testing.assert_array_equal(adapted, logits(edited, kv="h1b", device=device, adapter=only_tau))
    unadapted = logits(model, kv="h1b:tau=0.2", device=device)
    assert np.abs(adapted - unadapted).max() > 0.1


def test_gpt2_takes_the_whole_c_attn(tmp_path: pathlib.Path) -> None:
    model = golden_cases.write_checkpoint("gpt2", tmp_path / "base")
    (name,) = (n for n in golden_cases.tensors("gpt2") if n.endswith("h.0.attn.c_attn.weight"))
    adapter = write(tmp_path / "a", model, {"tau": np.ones((), np.float32), **changed_v_proj("gpt2", name)})
    plain = logits(model, kv="h1b:tau=1")
    assert np.abs(logits(model, kv="h1b", adapter=adapter) - plain).max() > 0.1


def test_every_kv_head_gets_its_key_scale(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    scale = np.linspace(0.5, 1, 6, dtype=np.float32).reshape(3, 2)
    adapter = write(tmp_path / "a", model, {"key_scale": scale}, scheme="onebit")
    session = Session.load(model, kv="onebit", adapter=adapter)
    np.testing.assert_array_equal([cache.keys.key_scale for cache in session.caches], scale)


def test_every_head_of_every_layer_gets_its_tau(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    session = Session.load(model, kv="h1b", adapter=write(tmp_path / "a", model, {"tau": TAU}))
    np.testing.assert_array_equal([cache.tau.ravel() for cache in session.caches], TAU)
    session = Session.load(model, kv="h1b", adapter=write(tmp_path / "b", model, {"tau": TAU[:, 0].copy()}))
    assert [set(cache.tau.ravel()) for cache in session.caches] == [{tau} for tau in TAU[:, 0]]


def test_a_prompt_attends_as_the_adapted_model_was_trained_to(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A prompt at once is the same as its tokens one by one; without an adapter it attends exactly."""
    adapter = write(tmp_path / "a", model, {"tau": TAU})
    whole, single = (Session.load(model, kv="h1b", weights="f32", adapter=adapter) for _ in range(2))
    together = whole.logits(TOKENS)
    np.testing.assert_allclose(together, np.concatenate([single.logits([t]) for t in TOKENS]), atol=2e-4)
    exact = Session.load(model, kv="dense:dtype=f32", weights="f32").logits(TOKENS)
    assert np.abs(together - exact).max() > 0.1


def test_the_report_names_the_adapter_and_no_longer_warns(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    session = Session.load(model, kv="h1b", adapter=write(tmp_path / "mine.safetensors", model, {"tau": TAU}))
    list(session.generate(TOKENS, max_new_tokens=2, temperature=0.0))
    report = session.report()
    assert report.notes == ["h1b: tau 0.05 to 0.173 in layer 0 (adapter mine.safetensors), b = 256"]
    assert report.settings["adapter"] == "mine.safetensors"


def test_identity_follows_the_weights_only(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """So that the weight stores of base and adapted model are two, and a tau alone shares the base's."""
    plain = Model.open(model).identity
    assert Model.open(model, adapter=write(tmp_path / "a", model, {"tau": TAU})).identity == plain
    weights = {"tau": TAU, **changed_v_proj()}
    one = Model.open(model, adapter=write(tmp_path / "b", model, weights)).identity
    weights[V_PROJ] = weights[V_PROJ] + 1
    other = Model.open(model, adapter=write(tmp_path / "c", model, weights)).identity
    assert len({plain, one, other}) == 3


def test_what_a_scheme_learned_besides_is_of_each_layer(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The model's identity follows it, so that no session goes on without it."""
    config, rng = Model.open(model).config, np.random.default_rng(0)
    sizes = {"projection": (3, 256, config.head_dim), "centre": (3, config.n_kv_heads, config.head_dim)}
    learned = {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    adapter = write(tmp_path / "a", model, {"tau": TAU, **learned})
    session = Session.load(model, kv="h1b", adapter=adapter)
    np.testing.assert_array_equal([cache.sketch.projection for cache in session.caches], learned["projection"])
    np.testing.assert_array_equal([cache.sketch.centre for cache in session.caches], learned["centre"])
    store = Model.open(model).store(ModelFormat("int8")).folder
    identities = [Model.open(path, adapter=adapter).identity for path in (model, store)]
    assert identities[0] == identities[1] != Model.open(model).identity
    for name, wrong in (("projection", learned["projection"][:2]), ("centre", learned["centre"][0])):
        with pytest.raises(ConfigError, match=name):
            Model.open(model, adapter=write(tmp_path / name, model, {"tau": TAU, name: wrong}))


@pytest.mark.parametrize(
    ("scheme", "parameters", "problem"),
    [
        ("h1b", {"tau": -TAU}, "tau is -.* accepted: 0.0001 to"),
        ("h1b", {"tau": TAU[:, :2]}, r"tau has shape \(2,\) in a layer.* \(4,\)"),
        ("h1b", {"tau": TAU, "projection": TAU}, r"projection has shape \(4,\) in a layer"),
        ("h1b", {"tau": TAU, "key_scale": TAU}, "h1b takes tau and nothing else, not key_scale"),
        ("onebit", {"key_scale": TAU}, r"key_scale has shape \(4,\) in a layer.* \(2,\)"),
        ("onebit", {"tau": TAU}, "takes key_scale and nothing else"),
    ],
)
def test_wrong_parameters_are_refused_before_weights_are_read(
    scheme: str, parameters: dict[str, Any], problem: str, model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    parameters = {name: np.ascontiguousarray(array) for name, array in parameters.items()}
    adapter = write(tmp_path / "a", model, parameters, scheme=scheme)
    with mock.patch.object(Model, "store", None), raises(CacheError, field="adapter", match=problem):
        Session.load(model, kv=scheme, adapter=adapter)


def test_a_store_takes_a_tau_but_no_weights(model: pathlib.Path, tmp_path: pathlib.Path, cli: Cli) -> None:
    def quantize(folder: str, *arguments: str) -> pathlib.Path:
        cli("quantize", "--model", model, "--weights", "int8", "--output", tmp_path / folder, *arguments)
        return tmp_path / folder

    tau = write(tmp_path / "tau.safetensors", model, {"tau": TAU})
    weights = write(tmp_path / "weights.safetensors", model, {"tau": TAU, **changed_v_proj()})
    plain, adapted = quantize("plain"), quantize("adapted", "--adapter", str(weights))
    assert Model.open(plain, adapter=tau).identity == Model.open(model).identity
    with raises(ConfigError, weights, "replaces 1 tensors", plain, "original checkpoint", "quantize --adapter"):
        Model.open(plain, adapter=weights)
    with pytest.raises(ConfigError, match="belongs to the checkpoint"):
        Model.open(adapted, adapter=tau)
    stores = Model.open(adapted, adapter=weights).weights, Model.open(plain).weights
    expected = Model.open(model, adapter=weights).store(ModelFormat("int8"))
    for layer in range(3):
        values, unadapted = (store.matrix(f"{layer}.qkv") for store in stores)
        np.testing.assert_array_equal(values, expected.matrix(f"{layer}.qkv"))
        assert (values != unadapted).any() == (layer == 1)


def test_another_scheme_is_refused(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    adapter = write(tmp_path / "a", model, {"tau": TAU})
    for kv in ("dense", "sign_keys"):
        with raises(ConfigError, adapter, f"kv={kv!r}", "accepted: h1b", "leave `adapter` out", field="kv"):
            Session.load(model, kv=kv, adapter=adapter)


def test_bad_adapters(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    v_proj = golden_cases.tensors(CASE)[V_PROJ]
    cases: tuple[tuple[dict[str, Any], dict[str, str], list[str]], ...] = (
        ({"tau": TAU, "model.layers.9.x": TAU}, {}, ["'model.layers.9.x' is not in"]),
        ({"tau": TAU, V_PROJ: TAU}, {}, [V_PROJ, "(3, 4)", "(32, 64)"]),
        ({"tau": TAU, V_PROJ: np.zeros((32, 64), np.int8)}, {}, [V_PROJ, "I8", "F32"]),
        ({"tau": TAU[:2]}, {}, ["tau has shape (2, 4)", "() or (3, ...)"]),
        ({"tau": TAU * np.float32(np.nan)}, {}, ["tau", "not finite"]),
        ({V_PROJ: v_proj}, {}, ["no parameter of the scheme h1b"]),
        ({"tau": TAU}, {"format": "pt"}, ["format pt, version 1"]),
        ({"tau": TAU}, {"version": "2"}, ["version 2", "version 1"]),
        ({"tau": TAU}, {"base": "0123456789abcdef"}, ["0123456789abcdef", Model.open(model).identity]),
    )
    for i, (tensors, metadata, parts) in enumerate(cases):
        adapter = write(tmp_path / str(i), model, tensors, **metadata)
        with raises(ConfigError, adapter, *parts):
            Model.open(model, adapter=adapter)
    for name in ("base", "scheme"):
        known = {"format": "edgekv-adapter", "version": "1", "base": "0", "scheme": "h1b"}
        save_file({"tau": TAU}, tmp_path / "a", metadata={key: known[key] for key in known if key != name})
        with pytest.raises(ConfigError, match=name):
            Adapter.open(tmp_path / "a")
    (tmp_path / "a").write_bytes(b"no")
    with raises(CheckpointError, tmp_path / "a"):
        Model.open(model, adapter=tmp_path / "a")


def test_the_command_line_takes_adapters(stories: pathlib.Path, tmp_path: pathlib.Path, cli: Cli) -> None:
    config = Model.open(stories).config
    tau = np.full((config.n_layers, config.n_heads), 0.1, np.float32)
    adapter = write(tmp_path / "tau.safetensors", stories, {"tau": tau})
    (tmp_path / "text").write_text("Once upon a time there was a little girl. " * 30)
    run = ["run", "--greedy", "--model", stories, "--prompt", "Once upon a time", "--max-new-tokens", "4"]
    assert "(adapter tau.safetensors)" in cli(*run, "--kv", "h1b", "--adapter", adapter).err
    assert "--kv dense: " in cli(*run, "--adapter", adapter, status=2).err
    evaluate = ["eval", "--model", stories, "--text", tmp_path / "text", "--ctx", "64"]
    out = tmp_path / "out.json"
    cli(*evaluate, "--kv", "dense,h1b", "--adapter", adapter, "--json", out)
    facts = json.loads(out.read_text())
    assert facts["settings"]["adapter"] == "tau.safetensors"
    dense, h1b = facts["results"]
    assert dense["notes"] == []
    assert "(adapter tau.safetensors)" in h1b["notes"][0]
