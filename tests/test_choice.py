"""Which scheme is meant: by name, by a budget, by none; of auto the best that fits, and why."""

import pytest
from helpers import SCHEMES, raises

from edgekv.checkpoint.shipped import load_shape
from edgekv.errors import CacheError
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.choice import AUTO, check_budget, choose, resolve
from edgekv.models import architecture

CONFIG = architecture(load_shape("llama3.2-1b")).config
CTX = 8192
SIZES = [CacheSpec.parse(text).planned_bytes(CONFIG, CTX) for text in AUTO]


def test_each_step_down_takes_fewer_bytes() -> None:
    assert sorted(SIZES, reverse=True) == SIZES
    assert len(set(SIZES)) == len(SIZES)


@pytest.mark.parametrize("index", range(len(AUTO)))
def test_the_best_that_fits_to_the_byte(index: int) -> None:
    spec, reason = choose(CONFIG, CTX, SIZES[index])
    assert spec == CacheSpec.parse(AUTO[index])
    assert AUTO[index] in reason
    if index:
        assert AUTO[index - 1] in reason  # what more bytes would buy


def test_nothing_fits() -> None:
    with raises(CacheError, field="kv_budget", match=f"{SIZES[-1]} bytes"):
        choose(CONFIG, CTX, SIZES[-1] - 1)


def test_a_named_scheme_is_held_to_the_budget() -> None:
    spec = CacheSpec.parse("dense")
    check_budget(spec, CONFIG, CTX, SIZES[0])
    with raises(CacheError, field="kv_budget"):
        check_budget(spec, CONFIG, CTX, SIZES[0] - 1)


@pytest.mark.parametrize(
    ("kv", "budget", "meant"),
    [
        (None, None, "dense"),
        (None, 1 << 30, "steps:budget=1073741824"),
        ("steps", 1 << 30, "steps:budget=1073741824"),
        ("steps:residual_length=64", 1 << 30, "steps:budget=1073741824,residual_length=64"),
        ("steps:budget=1073741824", None, "steps:budget=1073741824"),
        ("onebit:v_bits=4", None, "onebit:v_bits=4"),
        (CacheSpec.parse("kivi2"), None, "kivi2"),
    ],
)
def test_what_is_meant(kv: str | CacheSpec | None, budget: int | None, meant: str) -> None:
    assert resolve(kv, CONFIG, CTX, budget, lambda: 0) == (CacheSpec.parse(meant), [])


def test_auto_takes_what_it_is_given() -> None:
    spec, (reason,) = resolve("auto", CONFIG, CTX, None, lambda: SIZES[2])
    assert spec == CacheSpec.parse(AUTO[2])
    assert AUTO[2] in reason


def test_steps_need_a_budget() -> None:
    with raises(CacheError, field="kv_budget"):
        resolve("steps", CONFIG, CTX, None, lambda: 0)
    with raises(CacheError, field="kv_budget"):
        CacheSpec.parse_list("dense,steps")


def test_lists() -> None:
    assert [spec.short for spec in CacheSpec.parse_list("onebit:v_bits=4,h1b")] == ["onebit:v_bits=4", "h1b"]
    two = CacheSpec.parse_list("kivi2:bits=4,residual_length=64,dense")
    assert [str(spec) for spec in two] == [
        str(CacheSpec.parse(t)) for t in ("kivi2:bits=4,residual_length=64", "dense")
    ]
    assert [spec.scheme.name for spec in CacheSpec.parse_list("all")] == [
        name for name in SCHEMES if name != "steps"
    ]


def test_a_knob_of_another_scheme_says_whose_it_is() -> None:
    with raises(CacheError, field="kv", match="tau applies to: h1b, sign_keys"):
        CacheSpec.parse("dense:tau=1")


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("f16:dtype=q8", "dense:dtype=q8"),
        ("loki1:b=64", "sign_keys:sketch_bits=64"),
        ("minicache4", "int4"),
        ("onebit:v=3,lam=1.0,window=64", "onebit:v_bits=3,key_scale=1.0,residual_length=64"),
        ("onebit:p=0,window=16", "onebit:residual_length=16"),
        ("h1b:b=128", "h1b:sketch_bits=128"),
        ("kivi2:window=0", "kivi2:residual_length=0"),
        ("kvcomp:window=0", "kvcomp:residual_length=0"),
        ("steps:window=0", "steps:residual_length=0"),
    ],
)
def test_earlier_names_are_understood(before: str, now: str) -> None:
    assert CacheSpec.parse(before) == CacheSpec.parse(now)
