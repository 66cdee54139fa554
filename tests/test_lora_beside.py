"""LoRAs beside the weights: PEFT's numbers, one store for all of them, and conversations that never mix."""

from __future__ import annotations

import functools
import json
import pathlib
import urllib.request
from typing import Any

import golden_cases
import lora_cases
import numpy as np
import pytest
from checkpoint_files import one_line
from safetensors.numpy import load_file, save_file
from serving import serving
from slot_cases import Recorded, at_once

from edgekv import LoadOptions, SamplingParams, Session
from edgekv.engine.cuda import CudaBackend
from edgekv.engine.loading import Options
from edgekv.errors import CheckpointError, ConfigError, SessionError
from edgekv.kvcache import CacheSpec
from edgekv.server.engine import SessionPool
from edgekv.weights.cuda import CudaOps

GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "lora.npz")
TOLERANCE = 2e-4
CASE = lora_cases.CASES["llama"]
TOKENS = golden_cases.tokens(CASE.model)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return golden_cases.write_checkpoint(CASE.model, tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return lora_cases.write("llama", tmp_path_factory.mktemp("lora") / "helper")


@pytest.fixture(scope="module")
def both(base: pathlib.Path, lora: pathlib.Path) -> Session:
    """Of a model with two of them."""
    return Session.load(base, loras={"one": lora, "half": f"{lora}:0.5"}, weights="f32", ctx=64)


def with_lora(session: Session, name: str | None) -> Session:
    """A conversation of its own."""
    fork = session.fork()
    fork.use_lora(name)
    return fork


def text(session: Session, prompt: list[int], n: int = 12) -> list[int]:
    return [step.token for step in session.generate(prompt, max_new_tokens=n, temperature=0.0)]


@pytest.mark.parametrize(
    ("name", "device"), [(name, ("cpu", "numpy")[i % 2]) for i, name in enumerate(lora_cases.CASES)]
)
def test_logits_are_those_of_peft(name: str, device: str, tmp_path: pathlib.Path) -> None:
    """And without it those of the model alone."""
    case = lora_cases.CASES[name]
    model = golden_cases.write_checkpoint(case.model, tmp_path / "base")
    given = {"own": f"{lora_cases.write(name, tmp_path / 'lora')}:{case.scale}"}
    tokens = golden_cases.tokens(case.model)
    options = LoadOptions(weights="f32", kv="dense:dtype=f32", device=device)
    with Session.load(model, **options, loras=given) as session, Session.load(model, **options) as plain:
        np.testing.assert_array_equal(session.logits(tokens), plain.logits(tokens))
        session.use_lora("own")
        np.testing.assert_allclose(session.logits(tokens)[::3], GOLDEN[name], atol=TOLERANCE, rtol=0)


def test_quantized_weights_stay_as_they_are(
    base: pathlib.Path, lora: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One store for the model and all its LoRAs, whose change is added to what that holds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = LoadOptions(weights="int4", kv="dense:dtype=f32")
    session = Session.load(base, **options, loras={"one": lora, "half": f"{lora}:0.5"})
    np.testing.assert_array_equal(session.logits(TOKENS), Session.load(base, **options).logits(TOKENS))
    assert len(list((tmp_path / "edgekv" / "stores").iterdir())) == 1
    exact = Session.load(base, **options, loras={"half": f"{lora}:0.5"}, device="numpy")
    found = []
    for each in (session, exact):
        each.use_lora("half")
        found.append(each.logits(TOKENS))
    assert np.sqrt(np.mean(np.square(found[0] - found[1]))) < 0.05 * found[1].std()  # activations are rounded, too


def test_a_conversation_is_of_one_lora(both: Session) -> None:
    plain, one, half = (with_lora(both, name) for name in (None, "one", "half"))
    texts = [text(session, TOKENS[:20]) for session in (plain, one, half)]
    assert len({tuple(each) for each in texts}) == 3
    assert (plain.lora, one.lora, one.fork().lora) == (None, "one", "one")
    assert one.report().settings["lora"].startswith("helper:1 (")
    assert "beside the weights" in one.report().settings["lora"]
    assert one.report().bytes_read_per_token - plain.report().bytes_read_per_token == 4 * 3 * (
        # rank 4: queries, keys and values, then the output projection, the two of gate and up, and down
        3 * 4 * 64 + 4 * 128 + 4 * (64 + 64) + 2 * 4 * 64 + 4 * 192 + 4 * (96 + 64)
    )
    with pytest.raises(SessionError, match="LoRA"):
        plain.copy_from(one)
    one.use_lora("half")
    assert not one.tokens
    assert text(one, TOKENS[:20]) == texts[2]
    with pytest.raises(ConfigError) as error:
        one.use_lora("none")
    one_line(error, "'none'", "one", "half")


def test_saved_sessions_go_on_with_their_own(
    both: Session, base: pathlib.Path, lora: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    saved, one = tmp_path / "s.ekv", with_lora(both, "one")
    one.prefill(TOKENS[:20])
    one.save(saved)
    expected = text(one, TOKENS[20:24])
    options = LoadOptions(weights="f32", loras={"another-name": lora, "half": f"{lora}:0.5"})
    for session in (Session.restore(saved, base, **options), Session.restore(saved, both)):
        assert text(session, TOKENS[20:24]) == expected
    other = with_lora(both, "half")
    other.load_state(saved)
    assert other.lora == "one"
    assert text(other, TOKENS[20:24]) == expected
    for given in ({}, {"half": f"{lora}:0.5"}):
        with pytest.raises(SessionError) as error:
            Session.restore(saved, base, weights="f32", loras=given)
        one_line(error, "the LoRA helper:1 (", "beside the weights", "no LoRA")


def test_those_of_several_loras_decode_together(
    base: pathlib.Path, lora: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in passes of its own."""
    session = Session.load(base, loras={"one": lora, "half": f"{lora}:0.5"}, weights="f32", slots=4, ctx=64)
    names = ("one", None, "half", "one")
    expected = [text(with_lora(session, name), TOKENS[:n]) for n, name in enumerate(names, 5)]
    assert len({tuple(each) for each in expected}) == 4
    passes = [Recorded(with_lora(session, name), monkeypatch) for name in (None, "one", "half")]
    works = [functools.partial(text, with_lora(session, name), TOKENS[:n]) for n, name in enumerate(names, 5)]
    assert at_once(works) == expected
    assert [sum(each.rows) for each in passes] == [11, 22, 11]


def test_what_one_has_read_is_not_anothers(both: Session) -> None:
    """Of the server's pool: also where there is one session for all."""
    prompt = TOKENS[:40]
    expected = {name: text(with_lora(both, name), prompt) for name in (None, "one", "half")}
    for room in (1, 8):
        pool = SessionPool(both.fork(), room * both.plan.cache_bytes)
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
        with pytest.raises(ConfigError) as error:
            Options(loras=names)  # type: ignore[arg-type]
        assert error.value.field == "loras"
        one_line(error)
    other = golden_cases.write_checkpoint("llama1", tmp_path / "other")
    with pytest.raises(ConfigError) as foreign:
        Session.load(other, loras={"one": lora})
    one_line(foreign, "k_proj", "(32, 64)", "(64, 64)", "trained on")
    huge = lora_cases.write("llama", tmp_path / "huge")
    file = huge / "adapter_model.safetensors"
    save_file({name: values * np.float32(1e38) for name, values in load_file(file).items()}, file)
    with pytest.raises(CheckpointError) as infinite:
        Session.load(base, loras={"one": f"{huge}:100"}, weights="f32")
    one_line(infinite, "not finite", "scale")


def test_a_gpu_has_none() -> None:
    for refused in (
        lambda: CudaBackend.require(CacheSpec.parse("dense"), loras=True),
        lambda: CudaOps.with_lora(None, {}),
    ):  # type: ignore[arg-type]
        with pytest.raises(ConfigError) as error:
            refused()
        one_line(error, "device='cpu'", "without a name")


def asked(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return dict(json.loads(reply.read()))


def test_a_server_has_several(demo_lora: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A request chooses by the model's name, and nothing of another's cache comes into its answer."""
    loras = {"mine": demo_lora, "half": f"{demo_lora}:0.5"}
    prompt = "It was a dark night when the old man came up the hill to the house, and he knew that it was"
    session = Session.load("demo", loras=loras, weights="f32", ctx=1024)
    expected, vectors = {}, {}
    for name in (None, *loras):
        session.use_lora(name)
        vectors[name or "demo"] = session.embed(prompt)
        steps = session.generate(prompt, max_new_tokens=16, sampling=SamplingParams(0.0))
        expected[name or "demo"] = "".join(step.text for step in steps)
    options = [part for name, folder in loras.items() for part in ("--lora", f"{name}={folder}")]
    with serving(tmp_path, *options, "--weights", "f32", "--slots", 2, "--prefix-cache", 1) as server:
        with urllib.request.urlopen(f"{server.url}/v1/models", timeout=60) as reply:
            cards = json.loads(reply.read())["data"]
        assert [card["id"] for card in cards] == ["demo", "mine", "half"]

        def text_of(name: str) -> str:
            body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "repetition_penalty": 1, "model": name}
            answer = asked(f"{server.url}/v1/completions", body)
            assert answer["model"] == name
            return str(answer["choices"][0]["text"])

        names = ["mine", "demo", "half", "half", "mine", "demo"]
        assert at_once([functools.partial(text_of, name) for name in names]) == [expected[name] for name in names]
        body = {"prompt": prompt, "max_tokens": 1, "model": "other"}
        assert asked(f"{server.url}/v1/completions", body)["model"] == "demo"
        for name, vector in vectors.items():
            answer = asked(f"{server.url}/v1/embeddings", {"input": prompt, "model": name})
            np.testing.assert_allclose(answer["data"][0]["embedding"], vector, atol=1e-5)
