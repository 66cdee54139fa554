"""Sessions on a GPU one after the other, beside each other and in threads: texts are those of the CPU."""

from __future__ import annotations

import pathlib
import threading
from typing import Any

import golden_cases
import numpy as np
import pytest
from cuda_cases import OnDevice

from edgekv import Session
from edgekv.errors import EdgeKVError

FAMILIES = ["llama2-gqa", "mistral", "qwen3", "gpt2", "smollm3", "olmo2", "granite", "gemma3-options"]
FAMILIES += ["gemma2-options", "phi3-longrope", "ministral3", "rope-dynamic"]
SCHEMES = [
    "dense",
    "planes",
    "onebit:residual_length=8",
    "h1b",
    "kivi2:residual_length=32",
    "kvcomp:residual_length=16,block=32",
]
FORMATS = ["f32", "int8", "int4"]
PROMPTS = (5, 64, 230)
N_NEW, CTX = 12, 256


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """Folders of the families, with as many positions as the prompts need."""
    folder, found = tmp_path_factory.mktemp("families"), {}
    for name in FAMILIES:
        config = golden_cases.CASES[name]
        longer = {key: CTX for key in ("max_position_embeddings", "n_positions") if key in config}
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(golden_cases.CASES, name, config | longer)
            found[name] = golden_cases.write_checkpoint(name, folder / name)
    return found


def texts(session: Session) -> list[list[int]]:
    """Greedy tokens after prompts of several lengths, each in a conversation of its own."""
    out = []
    for n in PROMPTS:
        session.reset()
        prompt = np.random.default_rng(n).integers(3, golden_cases.VOCAB, n).tolist()
        out.append([step.token for step in session.generate(prompt, max_new_tokens=N_NEW, temperature=0.0)])
    return out


def test_sessions_one_after_the_other(models: dict[str, pathlib.Path]) -> None:
    """Families by schemes by formats; the one before is still there, and speaks once more afterwards."""
    OnDevice.open("gpu")
    before: tuple[Session, list[list[int]]] | None = None
    refused = set()
    for family, scheme, form in [(a, b, c) for c in FORMATS for a in FAMILIES for b in SCHEMES]:
        options: dict[str, Any] = {"kv": scheme, "ctx": CTX, "weights": form}
        try:
            session = Session.load(models[family], device="cuda", **options)
        except EdgeKVError:
            refused.add(family)
            continue
        found = texts(session)
        assert texts(session) == found, (family, scheme, form)
        if (form, scheme) == (
            "f32",
            "dense",
        ):  # a bit of others may differ where sums are rounded in another order
            with Session.load(models[family], device="cpu", **options) as here:
                assert found == texts(here), (family, scheme)
        if before is not None:
            assert texts(before[0]) == before[1], (family, scheme, form)
            before[0].close()
        before = session, found
    assert refused <= {"gemma2-options"}  # not every scheme has bounded scores


def test_a_session_of_another_thread(models: dict[str, pathlib.Path]) -> None:
    """Loaded here and used there, as a server does, two of them beside each other."""
    OnDevice.open("gpu")
    sessions = [Session.load(models["llama2-gqa"], kv=kv, ctx=CTX, device="cuda") for kv in ("dense", "h1b")]
    expected, found = [texts(session) for session in sessions], [[], []]

    def speak(i: int) -> None:
        for _ in range(5):
            found[i].append(texts(sessions[i]))

    threads = [threading.Thread(target=speak, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[each] * 5 for each in expected]
