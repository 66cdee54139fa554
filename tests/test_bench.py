"""`edgekv bench`: every part is timed, whatever the machine's speed; bad input is refused; pictures and tables."""

import contextlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edgekv.checkpoint.shipped import load_shape, shape_names
from edgekv.cli import bench as command
from edgekv.cli import eval as eval_command
from edgekv.cli import main, plots
from edgekv.cli.terminal import WIDTH, fitted, table
from edgekv.engine.decoder import Decoder
from edgekv.engine.loading import find_device
from edgekv.engine.model import Model
from edgekv.eval.bench import BLOCKS, SchemeTimer, Timing, bench, bench_prefill
from edgekv.eval.evaluate import Quality
from edgekv.eval.gate import GateLimits, judge
from edgekv.kvcache import CacheSpec
from edgekv.power.energy import Trace
from edgekv.weights.formats import WEIGHTS
from edgekv.weights.random import random_store


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        store = random_store(load_shape("tiny", 2), WEIGHTS["int4"])
    model = Model(store.folder, store.config, None, store)
    return find_device("cpu").decoder(model, store.form, 1200, 2, None)


def test_schemes_are_timed(decoder: Decoder) -> None:
    specs = CacheSpec.parse_list("dense,planes,onebit,kivi2")
    timings = bench(decoder, specs, [300], tokens=8)
    assert not vars(decoder).keys() & set(BLOCKS)
    assert [t.kv for t in timings] == [str(spec) for spec in specs]
    for t in timings:
        assert (t.depth, t.tokens) == (300, 8)
        assert t.token_ms > 2 * t.attention_ms_layer > 0 < t.matmul_ms < t.token_ms_p95
        assert t.gb_per_s == pytest.approx(t.bytes_read_layer / t.attention_ms_layer / 1e6)
        assert 0 < t.bytes_read_layer <= t.cache_bytes


@pytest.mark.parametrize("name", ["dense", "planes", "kivi2", "h2o"])
def test_a_copied_cache_is_what_filling_it_gives(
    name: str, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counters, what was fitted, and every array of every layer."""
    states = []
    for copies in (True, False):
        if not copies:
            monkeypatch.setattr(SchemeTimer, "_first_alike", lambda timer: timer.caches)
        monkeypatch.setattr(SchemeTimer, "decode", lambda timer, n: None)
        states.append([cache.state() for cache in SchemeTimer(decoder, CacheSpec.parse(name), 300, 8).caches])
    for copied, filled in zip(*states, strict=True):
        assert copied.counters == filled.counters
        assert str(copied.fitted) == str(filled.fitted)
        for array, expected in copied.arrays.items():
            np.testing.assert_array_equal(expected, filled.arrays[array])


def test_prefill_counts_the_prompt(decoder: Decoder) -> None:
    (result,) = bench_prefill(decoder, [CacheSpec.parse("onebit")], [300])
    assert result.tokens == 300
    assert 0 < result.matmul_s < result.seconds
    assert result.tokens_per_s == pytest.approx(300 / result.seconds)


def test_random_weights_have_the_deviation_of_real_ones(decoder: Decoder) -> None:
    assert np.std(decoder.weights.matrix("0.down")) == pytest.approx(0.02, rel=0.02)
    logits = decoder.head(decoder.embed([1, 2, 3], 0))
    assert np.isfinite(logits).all()
    assert np.std(logits) > 0


def test_command_writes_every_timing_and_a_picture(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    out, picture = tmp_path / "bench.json", tmp_path / "b.svg"
    options = "--shape tiny --layers 1 --weights int4 --kv dense,kivi2:bits=4,group=64 --ctx 0,300 --tokens 1"
    more = ["--prefill", "64", "--json", str(out), "--plot", str(picture)]
    assert main(["bench", *options.split(), *more]) == 0
    facts = json.loads(out.read_text())
    assert [(t["kv"].partition(":")[0], t["depth"]) for t in facts["timings"]] == [
        (kv, depth) for depth in (0, 300) for kv in ("dense", "kivi2")
    ]
    assert facts["settings"]["layers"] == 1
    assert facts["prefill"][0]["tokens"] == 64
    text = capsys.readouterr().out
    assert "GB/s" in text
    assert "kivi2" in text
    assert b"<svg" in picture.read_bytes()
    for bad in ("/no/folder/x.png", str(tmp_path / "x.doc")):
        assert main(["bench", "--plot", bad]) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--shape llama9", "no such shape; accepted are"),
        ("--ctx 1,x --shape tiny", "--ctx 1,x: accepted are numbers of tokens from 0"),
        ("--prefill 0 --shape tiny", "--prefill 0: accepted are numbers of tokens from 1"),
        ("--layers 2", "only a --shape can have other layers"),
        ("--shape tiny --model x", "give one of them"),
        ("--ctx 900000", "positions"),
    ],
)
def test_bad_input_is_one_line(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *options.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_every_shape_is_known_by_name() -> None:
    assert {"llama2-7b", "llama3.1-8b", "llama3.2-1b", "gpt2", "tiny"} <= set(shape_names())


# Pictures and tables


def quality(kv: str, kl: float, cache_bytes: int) -> Quality:
    return Quality(str(CacheSpec.parse(kv)), 1024, 20.0, 1.0, kl, kl, 0.95, 0.95, cache_bytes, 100, 1.0, ())


QUALITIES = [
    quality("dense", 0.0, 900),
    quality("kivi2:bits=4", 0.001, 300),
    quality("kivi2", 0.01, 200),
    quality("h1b:fit=head", 1.0, 100),
]
TIMINGS = [Timing("onebit", 8192, 32, 10.0, 12.0, 5.0, 0.5, 1 << 20, 2.0, 1 << 24)]


def test_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []

    @contextlib.contextmanager
    def picture(path: str, width: float, height: float) -> Iterator[Any]:
        from matplotlib import pyplot

        figure, axes = pyplot.subplots()
        drawn.append(axes)
        yield axes
        pyplot.close(figure)

    plots.require_matplotlib()
    monkeypatch.setattr(plots, "_picture", picture)
    watts = np.array([[2.0, 1.0], [3.0, 1.0], [4.0, 1.0]])
    trace = Trace(np.array([10.0, 10.5, 11.0]), watts, np.full((3, 2), np.nan), ("cpu", "rest"), ("cpu", "rest"))
    plots.plot_power(trace, "x.png")
    plots.plot_quality(QUALITIES, 8192, "x.png")
    plots.plot_times(TIMINGS, 4, "x.png")
    power, kl, times = drawn
    assert power.lines[0].get_xdata().tolist() == [0, 0.5, 1]
    assert power.lines[0].get_ydata().tolist() == [3, 4, 5]
    points = {(x, y) for line in kl.lines for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)}
    assert points == {(q.cache_bytes / 8192, max(q.kl, plots.LEAST_KL)) for q in QUALITIES}
    assert sorted(len(line.get_xdata()) for line in kl.lines) == [1, 1, 2]  # the forms of a scheme are joined
    assert [bar.get_width() for bar in times.patches] == [5.0, 2.0, 3.0]


def test_tables_fit_and_name_schemes_in_full() -> None:
    verdicts = [judge(quality, (3, 20), GateLimits()) for quality in QUALITIES]
    columns = eval_command.quality_columns(8192)
    narrow = table(columns, QUALITIES)
    for text in (narrow, table(command.COLUMNS, TIMINGS), table(eval_command.GATE, verdicts)):
        assert max(map(len, text.splitlines())) <= WIDTH
    assert "kivi2:bits=4 " in narrow
    assert "top1 late" not in narrow
    assert "top1 late " in table(columns, QUALITIES, wide=True)
    rows = [["kv", "n", "what"], ["a", "10", "x" * 200]]
    cut = fitted(rows, left=(0, 2))
    assert cut[0] == "kv   n  what"
    assert (len(cut[1]), cut[1][-3:]) == (WIDTH, "...")
    assert len(fitted(rows, left=(0, 2), wide=True)[1]) > 200
