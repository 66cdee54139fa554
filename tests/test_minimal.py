"""examples/minimal.py: its greedy text is the engine's, and what it packs is what its kernels read."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
import subprocess
import sys
from types import ModuleType

import golden_cases
import numpy as np
import pytest
from helpers import text
from serving import DEMO, ROOT

from edgekv import SamplingParams, Session

PATH = ROOT / "examples" / "minimal.py"
PROMPT = "It was a dark night when the old man of 93 said: 'Où?'"


@pytest.fixture(scope="module")
def minimal() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minimal", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def greedy(folder: pathlib.Path, ids: list[int], n: int) -> list[int]:
    """Returns the engine's tokens from float32 weights."""
    with Session.load(folder, kv="dense", ctx=len(ids) + n, weights="f32") as session:
        return text(session, ids, n, sampling=SamplingParams(0.0))


def written(minimal: ModuleType, folder: pathlib.Path, ids: list[int], n: int, exact: bool) -> list[int]:
    config = json.loads((folder / "config.json").read_text())
    kind = {"llama": minimal.Llama, "gpt2": minimal.Gpt2}[config["model_type"]]
    return list(minimal.generate(kind(folder, config, len(ids) + n, exact), ids, n, 0.0))


def test_it_stands_alone() -> None:
    source = PATH.read_text()
    assert len(source.splitlines()) <= 400
    assert not re.search(r"^\s*(from|import) edgekv", source, re.MULTILINE)


def test_the_demo_models_text_is_the_engines(minimal: ModuleType) -> None:
    tokenizer = minimal.SentencePiece(DEMO)
    with Session.load(DEMO, ctx=64) as session:
        ids = session.encode(PROMPT)
    assert tokenizer.encode(PROMPT) == ids
    assert b"".join(map(tokenizer.decode, ids)).decode() == " " + PROMPT
    assert written(minimal, DEMO, ids, 80, exact=True) == greedy(DEMO, ids, 80)


def test_a_gpt2s_text_is_the_engines(minimal: ModuleType, shared: pathlib.Path, tmp_path: pathlib.Path) -> None:
    golden = golden_cases.write_published_gpt2(shared, tmp_path)
    for ids, published in zip(golden["input_ids"], golden["greedy_max_length_10"], strict=True):
        assert ids + written(minimal, tmp_path, ids, 10 - len(ids), exact=True) == published
        assert written(minimal, tmp_path, ids, 300, exact=True) == greedy(tmp_path, ids, 300)


def test_packed_scores_and_sums(minimal: ModuleType) -> None:
    """Against their meaning: k is about c + s R'b, q is rounded to 8 bits, v is about s R'L; 3 queries a head."""
    rng, n, d = np.random.default_rng(0), 300, 24
    k, v = (rng.standard_normal((n, 2, d)).astype(np.float32) + rng.standard_normal((2, d)) for _ in range(2))
    cache = minimal.Cache(2, d, n, False)
    cache.append(k.astype(np.float16), v.astype(np.float16))
    assert (cache.n_packed, cache.n_packed + cache.n_exact) == (192, n)
    packed = slice(minimal.FIRST, minimal.FIRST + 192)
    signs = np.unpackbits(cache.signs[:, :192].view(np.uint8), axis=-1, bitorder="little")[..., :d] * 2.0 - 1
    centres = np.repeat(cache.centres[:, :3].astype(np.float32), 64, axis=1)
    keys = k.transpose(1, 0, 2).astype(np.float16).astype(np.float32)
    values = v.transpose(1, 0, 2).astype(np.float16).astype(np.float32)
    assert (((keys[:, packed] - centres) @ cache.rotation.T >= 0) == (signs > 0)).mean() > 0.999
    keys[:, packed] = centres + cache.k_scales[:, :192, None] * signs @ cache.rotation
    codes = np.stack([cache.codes[:, :192] >> 2 * i & 3 for i in range(4)], axis=-1).reshape(2, 192, -1)[..., :d]
    rebuilt = cache.v_scales[:, :192, None] * minimal.LEVELS[codes] @ cache.rotation
    assert np.linalg.norm(rebuilt - values[:, packed]) < 0.36 * np.linalg.norm(values[:, packed])
    values[:, packed] = rebuilt
    q = rng.standard_normal((6, d)).astype(np.float32)
    out = cache.attend(q)
    for h in range(6):
        scores = keys[h // 3] @ q[h]
        p = np.exp(scores - scores.max())
        expected = p @ values[h // 3] / p.sum()
        error = np.linalg.norm(out[h] - expected) / np.linalg.norm(expected)
        assert error < 0.02  # the query's 8 bits; found .006
    used = [cache.signs, cache.codes, cache.k_scales, cache.v_scales]
    bytes_per_token = 2 * (8 + 6 + 2 + 2 + 2 * d / 64)
    assert cache.nbytes() == 192 * bytes_per_token + 2 * 2 * 2 * d * cache.n_exact
    assert all(x.shape[1] == n for x in used)


def test_its_command_line() -> None:
    command = [sys.executable, str(PATH), str(DEMO), "Once upon a time", "150", "--temperature", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    answer, _, report = done.stdout.rstrip().rpartition("\n")
    assert len(answer) > 100
    used, f16 = (int(x.replace(",", "")) for x in re.findall(r"([\d,]+) (?:bytes|in float16)", report))
    assert used < f16
