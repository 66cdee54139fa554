"""The run report: its arithmetic, what it says of things not measured, and that its file is whole or absent."""

import json
import pathlib

import numpy as np
import pytest

from edgekv.engine.report import RunReport


def make_report(**fields):
    return RunReport(
        settings={"kv": "h1b", "ctx": 8192, "seed": 5, "tau": None},
        model={"name": "llama-40m", "n_parameters": 40_100_000, "head_dim": 128},
        machine={"architecture": "aarch64"},
        **fields,
    )


def measured_report():
    return make_report(
        prefill_tokens=8000,
        prefill_s=16.0,
        decode_latencies_s=[0.020, 0.030, 0.020, 0.020, 0.110],
        time_to_first_token_s=16.25,
        cache_bytes=13 * 2**20,
        weights_bytes=50 * 2**20,
        bytes_read_per_token=60_000_000,
        peak_rss_bytes=2**30,
        notes=["h1b untuned: perplexity is about 4x worse"],
        finish_reason="length",
        finish_message="max_new_tokens",
    )


def test_derived_numbers():
    numbers = measured_report().as_dict()
    assert numbers["prefill_tokens_per_s"] == 500
    assert numbers["decode_tokens"] == 5
    assert numbers["decode_tokens_per_s"] == pytest.approx(25)
    assert numbers["latency_median_ms"] == pytest.approx(20)
    assert numbers["latency_p95_ms"] == pytest.approx(94)  # 80% of the way from the 4th to the 5th
    assert numbers["achieved_gb_per_s"] == pytest.approx(3)


def test_what_was_not_measured_is_none():
    numbers = make_report().as_dict()
    unmeasured = {
        "prefill_s",
        "time_to_first_token_s",
        "cache_bytes",
        "weights_bytes",
        "bytes_read_per_token",
        "peak_rss_bytes",
        "energy",
        "finish_reason",
        "finish_message",
        "prefill_tokens_per_s",
        "decode_tokens_per_s",
        "latency_median_ms",
        "latency_p95_ms",
        "achieved_gb_per_s",
        "images",
        "state_bytes",
        "drafts",
    }
    assert {name for name, value in numbers.items() if value is None} == unmeasured
    assert (numbers["prefill_tokens"], numbers["decode_tokens"]) == (0, 0)


def test_the_text_of_a_run():
    assert measured_report().to_text().splitlines() == [
        "model       llama-40m, 40.1 M parameters",
        "settings    kv h1b, ctx 8192, seed 5",
        "prefill     8000 tokens, 500.0 tokens/s",
        "first token 16.250 s",
        "decode      5 tokens, 25.00 tokens/s, 20.0 ms/token median, 94.0 ms p95",
        "memory      cache 13.0 MiB (13631488 B), weights 50.0 MiB (52428800 B), peak RSS 1.0 GiB (1073741824 B)",
        "bandwidth   3.00 GB/s achieved, 57.2 MiB (60000000 B) per token",
        "stopped     max_new_tokens",
        "note        h1b untuned: perplexity is about 4x worse",
    ]


def test_the_text_of_a_run_that_measured_nothing():
    text = make_report().to_text()
    assert "prefill     0 tokens, not measured\n" in text
    assert "decode      no token\n" in text
    assert "None" not in text
    assert "nan" not in text


def test_the_file_holds_the_dict_and_nothing_lies_beside_it(tmp_path):
    report, path = measured_report(), tmp_path / "run.json"
    path.write_text("an older and much longer report" * 1000)
    report.write_json(path)
    assert json.loads(path.read_text()) == report.as_dict()
    assert list(tmp_path.iterdir()) == [path]


def test_settings_of_any_type_fit_json(tmp_path):
    report = RunReport(
        settings={
            "model": pathlib.Path("a/b"),
            "ctx": np.int64(8192),
            "tau": np.float32(0.5),
            "threshold": float("inf"),
            "stop": ("x", "\udcff"),
            "scheme": {"bits": np.arange(2)[1], "exact": np.bool_(True)},
        },
        model={},
        machine={},
    )
    report.write_json(tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text())["settings"] == {
        "model": "a/b",
        "ctx": 8192,
        "tau": 0.5,
        "threshold": None,
        "stop": ["x", "\udcff"],
        "scheme": {"bits": 1, "exact": True},
    }
