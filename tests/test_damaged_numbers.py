"""NaN and infinities from a damaged model or session end in an EdgeKVError or in logits, by every scheme."""

from __future__ import annotations

import pathlib

import golden_cases
import numpy as np
import pytest
from cache_cases import attend_singly, draw, make, read_prompt
from safetensors.numpy import load_file, save_file

from edgekv import EdgeKVError, Session
from edgekv.errors import CheckpointError
from edgekv.kvcache import schemes

HEADS, CAPACITY, PROMPT = (4, 2, 64), 400, 260
SMALL = dict.fromkeys(("h2o", "tova", "mikv", "streaming"), "budget=100") | {
    "snapkv": "budget=100,observe=16,interval=16",
    "fier": "k=64,skip=0",
    "quest": "k=64,skip=0",
    "onebit": "residual_length=64",
}
SCHEMES = [f"{name}:{SMALL[name]}" if name in SMALL else name for name in schemes()]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy says what it is given


@pytest.mark.parametrize("backend", ["numba", "numpy"])
@pytest.mark.parametrize("kv", SCHEMES)
def test_tokens_of_a_layer(kv: str, backend: str) -> None:
    """Prompt and later tokens have a NaN token each, infinite ones and equal ones."""
    tokens = draw(HEADS, CAPACITY, seed=1)
    for x in tokens:
        for value, at in ((np.nan, 50), (np.inf, 60), (-np.inf, 70), (3e38, 80), (np.nan, 300), (np.inf, 310)):
            x[:, at] = value
        x[:, 90:190] = 0.5
    cache = make(kv, HEADS, CAPACITY, backend, layer=2, n_layers=4)
    read_prompt(cache, tokens, PROMPT)
    attend_singly(cache, tokens, PROMPT)
    assert cache.counters_valid()


def damage(folder: pathlib.Path, tensor: str, value: float = np.nan) -> pathlib.Path:
    """Sets row 3 of a tensor to a value."""
    arrays = load_file(folder / "model.safetensors")
    arrays[tensor][3] = value
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("weights", ["f32", "int8", "int4", "int4-32", "q3"])
@pytest.mark.parametrize(
    ("name", "part", "value"),
    [
        ("mixtral", "self_attn.k_proj.weight", np.nan),
        ("mixtral", "self_attn.q_proj.weight", -1e16),
        ("mixtral", "block_sparse_moe.gate.weight", -np.inf),
        ("llama1", "input_layernorm.weight", np.nan),
        ("qwen2", "self_attn.v_proj.bias", np.inf),
    ],
)
def test_weights_are_checked_when_loaded(
    name: str, part: str, value: float, weights: str, tmp_path: pathlib.Path
) -> None:
    """Also those that are not quantized: all as f32, a router's, norms and biases."""
    folder = damage(golden_cases.write_checkpoint(name, tmp_path), f"model.layers.1.{part}", value)
    problem = "that is not finite, or not below 1e" if part.endswith("j.weight") else "that is not finite"
    with pytest.raises(CheckpointError, match=f"{part}' has a number {problem}"):
        Session.load(folder, weights=weights)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A model whose token 3 is NaN, with room for more tokens than the schemes hold exactly."""
    folder, longer = tmp_path_factory.mktemp("model"), {"max_position_embeddings": CAPACITY}
    return damage(golden_cases.write_checkpoint("llama1", folder, **longer), "model.embed_tokens.weight")


@pytest.mark.parametrize("kv", SCHEMES)
def test_a_model_and_its_sessions(kv: str, model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A token that is NaN, in a prompt, behind one, and in what a saved session holds."""
    session = Session.load(model, kv=kv, weights="int8")
    sound = [7 + i % 80 for i in range(PROMPT)]
    session.prefill(sound)
    session.logits([3, *sound[:30]])
    session.save(tmp_path / "file")
    restored = Session.restore(tmp_path / "file", model)
    np.testing.assert_array_equal(restored.logits([9]), session.logits([9]))
    if kv == "dense":
        with pytest.raises(EdgeKVError, match="the largest logit is nan"):
            next(restored.generate([9], temperature=0.0))
    session.reset()
    session.prefill([*sound[:100], 3, *sound])
