"""GGUF files: every architecture as the checkpoint that it was made from, llama.cpp's own text, commands."""

import json
import os
import pathlib
import shutil
import sys

import gguf_cases
import gguf_files
import gguf_writer
import golden_cases
import numpy as np
import numpy.typing as npt
import pytest

from edgekv import Session
from edgekv.cli import main
from edgekv.engine.model import Model
from edgekv.errors import EdgeKVError
from edgekv.models import gguf_families

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDEN = json.loads((ROOT / "tests" / "golden" / "llama_cpp_demo.json").read_text())
CONVERTED = json.loads((ROOT / "tests" / "golden" / "gguf.json").read_text())


def written_case(name: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> tuple[pathlib.Path, ...]:
    """A case of gguf_cases as a checkpoint, and as GGUF in float32."""
    monkeypatch.setitem(golden_cases.CASES, name, gguf_cases.CASES[name])
    checkpoint = golden_cases.write_checkpoint(name, folder / name)
    return checkpoint, gguf_writer.write_gguf(checkpoint, folder / f"{name}.gguf")


@pytest.mark.parametrize("name", gguf_cases.CASES)
def test_the_files_of_these_tests_are_the_converters(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and tensors: what llama.cpp's own converter wrote of the same checkpoint."""
    _, path = written_case(name, tmp_path, monkeypatch)
    assert gguf_files.contents(path) == CONVERTED[name]


@pytest.mark.parametrize("name", gguf_cases.CASES)
def test_every_architecture_is_read(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are those of the checkpoint: but for numbers that a key has in float32, to the bit."""
    checkpoint, path = written_case(name, tmp_path, monkeypatch)
    tokens = golden_cases.tokens(name)
    kv = "dense:dtype=f32"
    ours, expected = (Session.load(each, kv=kv, device="numpy").logits(tokens) for each in (path, checkpoint))
    np.testing.assert_allclose(ours, expected, atol=2e-5, rtol=0)
    assert {gguf_families()[each["architecture"]].model_type for each in CONVERTED.values()} == {
        family.model_type for family in gguf_families().values() if family.model_type != "gpt2"
    }


@pytest.mark.parametrize("kind", GOLDEN["tokens"])
def test_greedy_text_is_llama_cpps(kind: str, tmp_path: pathlib.Path) -> None:
    """Both round the activations of quantized layers, each in its way: where two tokens are near, texts part."""
    path = gguf_writer.write_gguf(ROOT / "models" / "demo", tmp_path / "demo.gguf", kind)
    session = Session.load(path, kv="dense", ctx=256)
    tokens = [step.token for step in session.generate(GOLDEN["prompt"], max_new_tokens=64, temperature=0.0)]
    assert session.tokens[: len(GOLDEN["prompt_ids"])] == GOLDEN["prompt_ids"]
    expected = GOLDEN["tokens"][kind]
    same = next((i for i, pair in enumerate(zip(tokens, expected, strict=True)) if pair[0] != pair[1]), None)
    if same is not None and kind != "F16":  # processors round differently, too
        logits = logits_after(session, [*GOLDEN["prompt_ids"], *expected[:same]])
        assert logits[tokens[same]] - logits[expected[same]] < 0.1
        return
    assert tokens == expected


def logits_after(session: Session, tokens: list[int]) -> npt.NDArray[np.float32]:
    """Of the token behind these."""
    session.reset()
    return session._runner.append(tokens, [])[0]


def test_the_second_start_does_not_need_the_library(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its walk through the header takes seconds for a large vocabulary; the cache folder has what it found."""
    path = gguf_writer.write_gguf(ROOT / "models" / "demo", tmp_path / "demo.gguf", "F16")
    first = Model.open(path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    second = Model.open(path)
    assert second.identity == first.identity
    assert Session.load(path, ctx=64).encode("Once") == Session.load(ROOT / "models" / "demo", ctx=64).encode(
        "Once"
    )
    os.utime(path, ns=(1, 1))  # another file as far as we know
    with pytest.raises(EdgeKVError, match=r"pip install 'edgekv\[gguf\]'"):
        Model.open(path)


def test_run_info_and_a_store_that_travels(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = gguf_writer.write_gguf(ROOT / "models" / "demo", tmp_path / "demo.gguf", "Q8_0")
    assert main(["info", "--model", str(path)]) == 0
    assert "gguf" in capsys.readouterr().out
    run = ["run", "--greedy", "--prompt", GOLDEN["prompt"], "--max-new-tokens", "20", "--ctx", "256"]
    assert main([*run, "--model", str(path)]) == 0
    text = capsys.readouterr().out
    assert main(["quantize", "--model", str(path), "--output", str(tmp_path / "store")]) == 0
    path.unlink()
    shutil.rmtree(pathlib.Path(os.environ["XDG_CACHE_HOME"]) / "edgekv" / "gguf")
    capsys.readouterr()
    assert main([*run, "--model", str(tmp_path / "store")]) == 0
    assert capsys.readouterr().out == text
