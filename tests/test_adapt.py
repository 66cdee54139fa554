"""tools/papers/adapt.py: the student computes what edgekv computes, learns, and leaves an adapter for it."""

import pathlib
from typing import Any

import golden_cases
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'edgekv[torch]'")

ROOT = pathlib.Path(__file__).resolve().parent.parent

import adapt  # noqa: E402

from edgekv.checkpoint.checkpoint import open_checkpoint  # noqa: E402
from edgekv.engine.loading import find_device  # noqa: E402
from edgekv.engine.model import Model  # noqa: E402
from edgekv.eval.evaluate import evaluate  # noqa: E402
from edgekv.kvcache import CacheSpec  # noqa: E402

N = 48


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    """Has PyTorch use one thread: several wait for each other longer than these models take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trainer(case: str, kv: str, folder: pathlib.Path, rows: Any, **settings: Any) -> adapt.Trainer:
    source = open_checkpoint(golden_cases.write_checkpoint(case, folder / case))
    known = {"held_back": 1, "batch": 2, "lr": 3e-3}
    return adapt.Trainer(source, CacheSpec.parse(kv), rows, adapt.Settings(**(known | settings)))


@pytest.mark.parametrize(
    ("case", "kv", "settings"),
    [
        ("llama-biases", "h1b:keys_only=1,sketch_bits=512", {"scope": "global"}),
        ("gpt2-options", "sign_keys:seed=3", {"scope": "head"}),
    ],
)
def test_the_student_computes_what_edgekv_computes(
    case: str, kv: str, settings: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    """`edgekv eval`'s own path with the adapter after one step, from the embedding to the perplexity."""
    windows = torch.from_numpy(np.random.default_rng(0).integers(0, golden_cases.VOCAB, (3, N)))
    made = trainer(case, kv, tmp_path, windows, **settings)
    made.update(made.windows[:2])
    path, spec = tmp_path / "adapter.safetensors", CacheSpec.parse(kv)
    adapt.write_adapter(path, made.student.weights.base.source.identity, spec, made.result(), {})
    model = Model.open(tmp_path / case, adapter=path)
    decoder = find_device("numpy").decoder(model, model.weight_format("f32"), N, 1, None)
    caches = spec.layers(model.config, N)
    model.adapter.adapt(caches)
    for cache in caches:
        cache.allocate(decoder.kernels, decoder.workspace)
    ids = made.windows[2]
    expected = decoder.prefill(decoder.embed(ids.numpy(), 0), caches, exact=False)
    with torch.no_grad():
        found = made.student.states(ids[None])[-1][0].numpy()
        dense = made.teacher.states(ids[None])[-1][0].numpy()
    np.testing.assert_allclose(found, expected, atol=2e-3)  # a projection near 0 may change its sign
    assert np.abs(dense - expected).max() > 1
    (result,) = evaluate(decoder, ids.tolist(), N, [spec], adapter=model.adapter)
    assert made.quality().perplexity == pytest.approx(result.perplexity, rel=1e-4)


def test_the_command_writes_an_adapter(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "adapter.safetensors"
    text.write_text("It was late, and the rain fell. She went to the town.\n" * 20)
    command = ["--model", str(ROOT / "models" / "demo"), "--text", str(text), "--out", str(out)]
    command += ["--kv", "h1b:sketch_bits=64", "--ctx", "32", "--held-back", "1", "--batch", "2", "--tokens", "96"]
    assert adapt.main([*command, "--epochs", "1"]) == 0
    assert "step 1 of 1" in capsys.readouterr().out
    Model.open(ROOT / "models" / "demo", adapter=out)
    assert adapt.main([*command, "--kv", "dense"]) == 2
    assert "has nothing to train; accepted: h1b, sign_keys" in capsys.readouterr().err
