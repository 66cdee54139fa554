"""The run report: its arithmetic, what it says of things not measured, and that its file is whole or absent."""

import json
import pathlib

import numpy as np
import pytest

from edgekv.engine.report import RunReport


def make_report(**fields):
    return RunReport(
        settings={"kv": "h1b", "weights": "int8", "ctx": 8192, "seed": 5, "tau": None},
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
    ).derived()


def test_derived_numbers():
    numbers = measured_report().as_dict()
    assert numbers["prefill_tokens_per_s"] == 500
    assert numbers["decode_tokens"] == 5
    assert numbers["decode_tokens_per_s"] == pytest.approx(25)
    assert numbers["latency_median_ms"] == pytest.approx(20)
    assert numbers["latency_p95_ms"] == pytest.approx(94)  # 80% of the way from the 4th to the 5th
    assert numbers["achieved_gb_per_s"] == pytest.approx(3)


def test_what_was_not_measured_is_none():
    report = make_report()
    measured = {"settings", "model", "machine", "notes", "compile_s", "prefill_tokens", "decode_tokens"}
    numbers = report.as_dict()
    assert {name for name, value in numbers.items() if value is not None} == measured | {"decode_latencies_s"}
    assert "None" not in report.to_text()
    assert "nan" not in report.to_text()


def test_the_text_of_a_run():
    lines = measured_report().to_text().splitlines()
    assert lines[0] == "model       llama-40m, 40.1 M parameters as int8, kv h1b, context 8192"
    assert lines[1].startswith("text        6 tokens at 25.0 tokens/s, the first after 16.25 s; prompt of 8000")
    assert lines[-1] == "note        h1b untuned: perplexity is about 4x worse"


def test_settings_of_any_type_fit_json():
    given = {
        "model": pathlib.Path("a/b"),
        "threshold": np.float32("inf"),
        "stop": ("x", "\udcff"),
        "scheme": {"bits": np.arange(2)[1], "exact": np.bool_(True)},
    }
    found = RunReport(settings=given, model={}, machine={}).as_dict()["settings"]
    expected = {"model": "a/b", "threshold": None, "stop": ["x", "\udcff"], "scheme": {"bits": 1, "exact": True}}
    assert json.loads(json.dumps(found)) == expected
