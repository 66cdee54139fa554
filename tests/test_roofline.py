"""tools/roofline.py against numbers worked out by hand."""

import dataclasses
import json
import pathlib
import sys
from typing import Any

import numpy as np
import pytest
import roofline
import roofline_need

from edgekv.checkpoint.shapes import load_shape
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.geometry import Geometry
from edgekv.models import architecture
from edgekv.power.boards import boards

NEED = roofline_need.Need(weights_bytes=3_000_000_000, cache_bytes=1_000_000_000, cycles=2e9)


def row(kernel: str, cycles: float) -> dict[str, Any]:
    return {"kernel": kernel, "cycles_per_token": cycles}


@pytest.mark.parametrize(
    ("cycles_per_s", "attention_ms", "bound"),
    [
        (40e9, 100, "memory"),  # 50 ms of cycles, and 100 ms for the bytes
        (10e9, 200, "cycles"),
    ],
)
def test_the_slower_of_memory_and_cycles_counts(cycles_per_s: float, attention_ms: float, bound: str) -> None:
    p = roofline.predict(NEED, roofline.Machine(10e9, 10e9, cycles_per_s, 5.0))
    assert (p.weights_ms, p.attention_ms, p.bound) == (pytest.approx(300), pytest.approx(attention_ms), bound)
    assert p.token_ms == pytest.approx(300 + attention_ms)
    assert p.joules == pytest.approx(5 * (0.3 + attention_ms / 1e3))


def test_without_counts_or_watts_the_bytes_are_left() -> None:
    need = dataclasses.replace(NEED, cycles=None)
    p = roofline.predict(need, roofline.Machine(10e9, 10e9, 1.0))
    assert (p.token_ms, p.bound, p.joules) == (pytest.approx(400), "memory", None)
    assert roofline.predict(NEED, roofline.Machine(10e9, 10e9)).token_ms == p.token_ms


def test_what_would_refute_a_prediction_lies_around_it() -> None:
    least, most = roofline.predict(NEED, roofline.Machine(10e9, 10e9, 10e9)).tokens_per_s
    assert least == pytest.approx(2 * (1 - roofline.TOLERANCE))
    assert most == pytest.approx(1 / (0.3 / roofline.BEST_SHARE + 0.2))  # cycles don't get fewer


def test_a_token_reads_every_weight_but_one_row_of_the_table() -> None:
    arch = architecture(load_shape("llama2-7b"))
    elements = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008) + 4096 * 32000
    norms = (2 * 32 + 1) * 4096
    assert roofline_need.weights_bytes(arch, "f32") == 4 * (elements + norms)
    assert roofline_need.weights_bytes(arch, "int4") == elements // 2 + elements // 128 * 4 + 4 * norms


def test_bytes_of_dense_are_those_of_every_key_and_value() -> None:
    cache = roofline_need.filled_cache(CacheSpec.parse("dense"), Geometry(4, 2, 128, 700))
    assert cache.n_seen == 700
    assert cache.bytes_read() == 700 * 2 * 2 * 128 * 2


def test_cycles_are_those_of_every_token_and_query_head() -> None:
    cache = roofline_need.filled_cache(CacheSpec.parse("dense"), Geometry(4, 2, 64, 100))
    counts = [row("scores f16", 80), row("values f16", 60), row("softmax", 7)]
    assert roofline_need.cycles(cache, counts) == 4 * 100 * (80 / 2 + 60 / 2 + 7)  # counted for 128 channels


def test_heads_that_share_keys_take_the_loop_for_most_of_them() -> None:
    names = {"a", "a, 2 rows", "a, 4 rows", "b", "b, 2 rows", "c"}
    assert roofline_need.together("a", 7, names) == "a, 4 rows"
    assert roofline_need.together("a", 3, names) == "a, 2 rows"
    assert roofline_need.together("b", 4, names) == "b, 2 rows"
    assert roofline_need.together("b", 1, names) == "b"
    assert roofline_need.together("c", 4, names) == "c"


def test_bitplane_reads_more_of_the_tokens_that_it_chose() -> None:
    cache = roofline_need.filled_cache(CacheSpec.parse("bitplane"), Geometry(4, 2, 64, 1000))
    cache.value_codec.counts = np.array([20.0, 5.0, 3.0])
    tokens = roofline_need.SCHEMES["bitplane"](cache)
    packed = cache.n_packed
    assert 800 < packed < 1000
    assert (tokens["1-bit scan"], tokens["centres"]) == (3 * 64, packed)
    assert tokens["scores f16"] == 1000 - packed
    assert (tokens["bitplane key"], tokens["bitplane key unpacked"]) == (20, 10)  # two heads share the key
    assert (tokens["bitplane value, 2 planes"], tokens["bitplane value, 4 planes"]) == (15, 5)


@pytest.mark.parametrize("scheme", roofline_need.SCHEMES)
def test_every_scheme_is_counted_for_every_processor(scheme: str) -> None:
    counts = json.loads(roofline.COUNTS.read_text(encoding="utf-8"))
    cache = roofline_need.filled_cache(CacheSpec.parse(scheme), Geometry(2, 1, 128, 600))
    for processor in roofline.PROCESSORS.values():
        assert (roofline_need.cycles(cache, counts["cpus"][processor]) or 0) > 0


def test_a_scheme_without_counts_has_none() -> None:
    cache = roofline_need.filled_cache(CacheSpec.parse("streaming"), Geometry(2, 1, 64, 100))
    assert roofline_need.cycles(cache, []) is None


def test_a_board_without_a_published_bandwidth_gets_the_pi_s_share() -> None:
    key = "jetson-nano"
    p = roofline.predict(NEED, roofline.machine_of(key, boards()[key]))
    bandwidth = 25.6e9 * 10.5 / 17.1
    assert p.weights_ms == pytest.approx(3e9 / bandwidth * 1e3)
    assert p.attention_ms == pytest.approx(2e9 / (4 * 1430e6) * 1e3)
    assert p.joules == pytest.approx(roofline.DECODING_W[key][0] * p.token_ms / 1e3)


def test_the_command_predicts_for_every_board(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--shape", "tiny", "--kv", "dense,onebit", "--ctx", "300", "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", ["roofline.py", *arguments])
    roofline.main()
    tables = capsys.readouterr().out.split("\nPREDICTED for ")[1:]
    assert [table.partition(":")[0] for table in tables] == [board.name for board in boards().values()]
    for table in tables:
        rows = [line.split()[:2] for line in table.splitlines()[2:]]
        assert rows == [["dense:dtype=f16", "300"], ["onebit:k_bits=1,v_bits=2,", "300"]]
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["shape"], written["weights"], len(written["boards"])) == ("tiny", "int4", len(boards()))


def timing(kv: str, read: int, attention_ms: float, token_ms: float) -> dict[str, Any]:
    measured = {"attention_ms_layer": attention_ms, "token_ms": token_ms}
    return {"kv": kv, "depth": 300, "bytes_read_layer": read} | measured


def bench(*timings: dict[str, Any]) -> dict[str, Any]:
    settings = {"model": "tiny", "layers": 2, "weights": "int4", "threads": 2}
    return {"bandwidth": 1e9, "settings": settings, "machine": {"cpu": "some CPU"}, "timings": timings}


def test_check_predicts_with_what_the_dense_run_achieved(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    dense = timing("dense:dtype=f16", 4000, 2.0, 10.0)  # 2000 bytes per ms; 6 ms for the weights
    near, far = timing("onebit", 1000, 0.6, 8.4), timing("h1b", 1000, 0.6, 9.1)  # 6 + 2 * 0.5 predicted
    path.write_text(json.dumps(bench(dense, near, far)))
    roofline.print_check(str(path))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows[0][-1] == "1.00"
    assert rows[1] == ["onebit", "300", "7.00", "8.40", "1.20"]
    assert rows[2][:5] == ["h1b", "300", "7.00", "9.10", "1.30"]
    assert " ".join(rows[2][5:]) == "off by more than 25%"


def test_check_needs_a_dense_run() -> None:
    with pytest.raises(SystemExit, match="--check needs a run with --kv dense"):
        roofline.check(bench(timing("onebit", 1000, 0.6, 8.4)))


def test_check_needs_a_benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["roofline.py", "--check"])
    with pytest.raises(SystemExit):
        roofline.main()
    assert "--check and --bench FILE go together" in capsys.readouterr().err
