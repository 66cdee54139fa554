"""Seeded faults have their place, and shipped models describe scenes."""

import importlib
import itertools
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import needs_papers, text_of
from kernel_cases import pairs

from edgekv import Session

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_every_two_values_meet_in_few_cases() -> None:
    axes = {"a": range(4), "b": "xyz", "c": (True, False), "d": range(5)}
    cases = pairs(**axes)
    assert len(cases) < 30 < 4 * 3 * 2 * 5
    for (i, first), (j, second) in itertools.combinations(enumerate(axes.values()), 2):
        assert {(case[i], case[j]) for case in cases} == set(itertools.product(first, second))


@needs_papers
def test_each_seeded_fault_has_its_place() -> None:
    command = [sys.executable, ROOT / "tools" / "faults" / "run.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_comparison_with_llamacpp(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model is refused without a text to read, and another build of llama.cpp makes files of its own."""
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "bench"))
    compare_llamacpp = importlib.import_module("compare_llamacpp")
    monkeypatch.setattr(sys, "argv", ["compare_llamacpp.py", "--llama", str(tmp_path), "--model", "demo"])
    with pytest.raises(SystemExit, match="2"):
        compare_llamacpp.main()
    assert "--model needs --text" in capsys.readouterr().err
    arguments, names = SimpleNamespace(llama=tmp_path, shape="tiny", layers=1, gguf=["Q4_0"]), set[str]()
    for program, library in ((b"1", b"1"), (b"1", b"2"), (b"2", b"2"), (b"2", b"2")):
        (tmp_path / "llama-quantize").write_bytes(program)
        (tmp_path / "libggml.so").write_bytes(library)
        names.add(compare_llamacpp.files_name(arguments))
    assert len(names) == 3
    assert all(name.startswith("tiny-1-Q4_0-") for name in names)


@pytest.mark.parametrize("kv", ["dense", "visual_planes"])
def test_the_shipped_model_describes_fresh_scenes(kv: str) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install 'edgekv[vision]'")
    from scenes import PROMPT, draw_scene, parse, render

    session = Session.load(ROOT / "models" / "scenes", kv=kv, ctx=456)
    for n in (1, 2):
        rng = np.random.default_rng([20, 1, n])
        scene = draw_scene(rng, n)
        session.reset()
        images = [image.fromarray(render(scene, rng))]
        steps = session.generate(PROMPT, images=images, max_new_tokens=160, temperature=0.0)
        assert parse(text_of(steps)) == (n, list(scene))
