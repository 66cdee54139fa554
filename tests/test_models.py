"""The decoders against transformers' logits, llama2.c's golden text and GPT-2's published numbers."""

import json
import pathlib

import golden_cases
import numpy as np
import pytest
from helpers import n_cached, text
from safetensors.numpy import save_file

from edgekv import Session
from edgekv.errors import ImageError
from edgekv.plugin import KVCache

GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "logits.npz")
TOLERANCE = 2e-4
SWITCHING = {"rope-longrope", "phi3-longrope"}  # all keys are computed again beyond 32 tokens


@pytest.mark.parametrize(
    ("name", "device"), [(name, "cpu" if i % 3 else "numpy") for i, name in enumerate(golden_cases.CASES)]
)
def test_logits_and_text_are_those_of_transformers(name: str, device: str, tmp_path: pathlib.Path) -> None:
    """A whole prompt, and two chunks followed by single tokens, give transformers' logits."""
    folder = golden_cases.write_checkpoint(name, tmp_path / "model")
    session = Session.load(folder, kv="dense:dtype=f32", weights="f32", device=device)
    tokens = golden_cases.tokens(name)
    whole = session.logits(tokens)
    np.testing.assert_allclose(whole[::3], GOLDEN[name], atol=TOLERANCE, rtol=0)
    session.reset()
    parts = [session.logits(tokens[:17]), session.logits(tokens[17:41])]
    parts += [session.logits([token]) for token in tokens[41:]]
    first = 17 if name in SWITCHING else 0  # from the second chunk on a sequence is long
    np.testing.assert_allclose(np.concatenate(parts)[first:], whole[first:], atol=TOLERANCE, rtol=0)
    if name != "rope-longrope":  # of which transformers computes the keys again for phi3 alone
        session.reset()
        expected = GOLDEN[f"{name}/greedy"].tolist()
        prompt = tokens[: golden_cases.N_TOKENS - len(expected)]
        assert text(session, prompt, len(expected)) == expected


def test_longrope_switches_both_ways(tmp_path: pathlib.Path) -> None:
    """The factors change where the sequence outgrows the original length, and back after a rewind."""
    folder = golden_cases.write_checkpoint("phi3-longrope", tmp_path / "model")
    session = Session.load(folder, kv="dense:dtype=f32", weights="f32")
    tokens = golden_cases.tokens("phi3-longrope")
    short = session.logits(tokens[:32])
    beyond = [session.logits([token])[0] for token in tokens[32:40]]
    session.rewind(20)
    assert n_cached(session) == 0
    np.testing.assert_allclose(session.logits(tokens[20:32]), short[20:], atol=TOLERANCE, rtol=0)
    session.reset()
    np.testing.assert_allclose(session.logits(tokens[:40])[32:], beyond, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["mistral", "gpt2"])
def test_a_prompt_in_chunks_is_one(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schemes that learn from a prompt's queries get those of all its tokens."""
    folder = golden_cases.write_checkpoint(name, tmp_path / "model")
    scheme = pytest.importorskip("edgekv.papers.h1b").H1B
    tokens, logits, seen, prefill = golden_cases.tokens(name), [], [], scheme.prefill

    def record(cache: KVCache, queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
        seen[-1].append(queries.copy())
        prefill(cache, queries, keys, values)

    monkeypatch.setattr(scheme, "prefill", record)
    for chunk in (256, 7):
        seen.append([])
        monkeypatch.setattr("edgekv.engine.decoder.CHUNK", chunk)
        logits.append(Session.load(folder, kv="dense:dtype=f32", weights="f32").logits(tokens))
        Session.load(folder, kv="h1b", weights="f32").prefill(tokens)
    np.testing.assert_allclose(logits[1], logits[0], atol=TOLERANCE, rtol=0)
    layers = golden_cases.CASES[name].get("num_hidden_layers", golden_cases.CASES[name].get("n_layer"))
    for whole, chunked in zip(*(queries[-layers:] for queries in seen), strict=True):
        assert whole.shape[1] >= len(tokens) - 1
        np.testing.assert_allclose(chunked, whole, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("name", "outer"), [("gemma3-options", "gemma3"), ("ministral3", "mistral3")])
def test_the_decoder_of_a_model_that_sees(name: str, outer: str, tmp_path: pathlib.Path) -> None:
    """Text alone is read from it: config.json and tensors as they are published."""
    arrays = {f"language_model.{tensor}": array for tensor, array in golden_cases.tensors(name).items()}
    arrays["vision_tower.vision_model.post_layernorm.weight"] = np.ones(4, np.float32)
    arrays["multi_modal_projector.norm.weight"] = np.ones(4, np.float32)
    config = {"model_type": outer, "image_token_index": 9, "vision_config": {}}
    save_file(arrays, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": golden_cases.CASES[name]}))
    session = Session.load(tmp_path, kv="dense:dtype=f32", weights="f32")
    logits = session.logits(golden_cases.tokens(name))
    np.testing.assert_allclose(logits[::3], GOLDEN[name], atol=TOLERANCE, rtol=0)
    with pytest.raises(ImageError, match=f"takes no images, its model_type is {outer}"):
        list(session.generate([1], images=[tmp_path / "photo.png"], temperature=0.0))


@pytest.mark.parametrize(("kv", "device"), [("dense", "cpu"), ("dense:dtype=f32", "numpy")])
def test_stories260k_reproduces_its_golden_text(shared: pathlib.Path, kv: str, device: str) -> None:
    golden = json.loads((shared / "golden" / "stories260K_greedy200.json").read_text())
    session = Session.load(shared / "models" / "stories260K", kv=kv, weights="f32", device=device)
    steps = list(session.generate([golden["bos"]], max_new_tokens=golden["steps"], temperature=0.0))
    assert [golden["bos"], *(step.token for step in steps)] == golden["token_ids"]
    assert "".join(step.text for step in steps).startswith(" Once upon a time")


def test_published_logits_of_a_random_gpt2(shared: pathlib.Path, tmp_path: pathlib.Path) -> None:
    golden = golden_cases.write_published_gpt2(shared, tmp_path)
    prompts, decoded = [], []
    for ids, greedy in zip(golden["input_ids"], golden["greedy_max_length_10"], strict=True):
        session = Session.load(tmp_path, weights="f32")
        prompts.append(session.logits(ids))
        decoded.append(session.logits([int(prompts[-1][-1].argmax())])[0])
        session.reset()
        assert ids + text(session, ids, 10 - len(ids)) == greedy
    for parts, name in ((prompts, "prompt"), (decoded, "decode1")):
        every_200th = np.concatenate([part.ravel() for part in parts])[::200]
        published = golden[f"{name}_logits_stride200"]
        np.testing.assert_allclose(every_200th, published, atol=golden["tolerance_in_source"])
