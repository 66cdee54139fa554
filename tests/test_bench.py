"""`edgekv bench`: every part is there and adds up, whatever the machine's speed; bad input is refused."""

import json

import numpy as np
import pytest

from edgekv.checkpoint.shapes import load_shape, names
from edgekv.cli import main
from edgekv.decoder.decoder import Decoder
from edgekv.kernels.cpu.stream import Bandwidth
from edgekv.kvcache import CACHES, CacheSpec
from edgekv.linear.formats import WEIGHTS
from edgekv.linear.random import random_store
from edgekv.quality.bench import SchemeTimer, bench, bench_prefill
from edgekv.quality.stopwatch import ATTENTION, Stopwatch
from edgekv.session.devices import find_device
from edgekv.session.model import Model


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        store = random_store(load_shape("tiny", 2), WEIGHTS["int4"])
    model = Model(store.folder, store.config, None, store)
    return find_device("cpu").decoder(model, store.form, 1200, 2, None)


def test_every_scheme_is_timed_in_parts_that_add_up(decoder: Decoder) -> None:
    specs = [CacheSpec.parse(name) for name in CACHES]
    kernels, dense = decoder.kernels, decoder.linear
    timings = bench(decoder, specs, [700], tokens=8, bandwidth=Bandwidth())
    assert (decoder.kernels, decoder.linear) == (kernels, dense)
    assert [t.kv for t in timings] == [str(spec) for spec in specs]
    for t in timings:
        assert t.depth == 700
        assert t.tokens == 8
        assert sum(t.parts.values()) == pytest.approx(t.token_ms)
        assert t.token_ms > t.attention_ms_layer > 0 < t.parts["matmul"] < t.token_ms_p95
        assert min(t.parts[name] for name in ATTENTION) >= 0 < t.parts["attend"], t.kv
        assert t.gb_per_s == pytest.approx(t.bytes_read_layer / t.attention_ms_layer / 1e6)
        assert 0 < t.bytes_read_layer <= t.cache_bytes


@pytest.mark.parametrize("name", CACHES)
def test_a_copied_cache_is_what_filling_it_gives(
    name: str, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counters, what was fitted, and every array of every layer."""
    states = []
    for copies in (True, False):
        runner = SchemeTimer(decoder, decoder.linear, decoder.kernels, CacheSpec.parse(name), 300, 8)
        if not copies:
            monkeypatch.setattr(runner, "_first_alike", lambda caches=runner.caches: caches)
        runner.fill()
        states.append([cache.state() for cache in runner.caches])
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
    weights = decoder.weights
    assert np.std(weights.matrix("0.down")) == pytest.approx(0.02, rel=0.02)
    logits = decoder.head(decoder.embed([1, 2, 3], 0))
    assert np.isfinite(logits).all()
    assert np.std(logits) > 0


def test_a_stopwatch_counts_only_when_it_is_on() -> None:
    watch = Stopwatch()
    double = watch.timed("work", lambda x: 2 * x)
    assert double(2) == 4
    assert watch.seconds == {}
    watch.on = True
    assert double(3) == 6
    assert watch.seconds["work"] > 0


def test_command_writes_every_timing(
    tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    out = f"{tmp_path}/bench.json"
    command = (
        "bench --shape tiny --layers 1 --weights int4 --kv dense,kivi2:bits=4,group=64 --ctx 0,300 --tokens 1"
    )
    assert main([*command.split(), "--prefill", "64", "--json", out]) == 0
    with open(out) as file:
        facts = json.load(file)
    assert [(t["kv"].partition(":")[0], t["depth"]) for t in facts["timings"]] == [
        (kv, depth) for depth in (0, 300) for kv in ("dense", "kivi2")
    ]
    assert facts["settings"]["layers"] == 1
    assert facts["bandwidth"] > 0
    assert facts["prefill"][0]["tokens"] == 64
    text = capsys.readouterr().out
    assert "GB/s" in text
    assert "kivi2" in text


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
    assert {"llama2-7b", "llama3.1-8b", "llama3.2-1b", "gpt2", "tiny"} <= set(names())
