"""The choice of a scheme: by name, by a budget, or `auto`, which takes the best that fits and says why."""

import pytest
from helpers import SCHEMES, raises

from edgekv.checkpoint.hub import load_shape
from edgekv.errors import CacheError
from edgekv.kvcache import CacheSpec, choice, registry
from edgekv.kvcache.choice import MAX_LOSS, MIN_SAVING, default_scheme, resolve, size_text
from edgekv.kvcache.registry import PRESETS
from edgekv.models import architecture

CONFIG = architecture(load_shape("llama3.2-1b")).config
CTX, HELD = 8192, 1 << 29
SIZES = {name: CacheSpec.parse(name).planned_bytes(CONFIG, CTX) for name in PRESETS}


def choose_beside(held: int, *passed: str) -> tuple[str, str]:
    """Returns the choice beside so many bytes of weights, where those presets passed the gate, and its reason."""
    spec, reason = choice.choose(CONFIG, CTX, held, passed)
    return spec.short, reason


def test_each_preset_takes_fewer_bytes_than_the_one_before() -> None:
    assert sorted(SIZES.values(), reverse=True) == list(SIZES.values())
    assert len(set(SIZES.values())) == len(SIZES)


def test_auto_takes_the_smallest_that_passed_the_gate() -> None:
    why = "kv auto took q3: the smallest that passed your gate on this model at this length (edgekv eval --gate)"
    assert choose_beside(HELD, "q3", "q8") == ("q3", why)


def test_auto_without_a_gate_takes_what_lost_little_wherever_it_was_measured() -> None:
    name, reason = choose_beside(HELD)
    losses = choice.published_results()["worst_kl"]
    assert name == min((n for n in PRESETS if losses[n] <= MAX_LOSS), key=SIZES.__getitem__) != "f16"
    assert name == default_scheme()
    assert f"{losses[name]:.4f}" in reason


@pytest.mark.parametrize(("more", "name"), [(0, "q2"), (1, "f16")])
def test_auto_takes_f16_where_less_than_a_tenth_is_saved(more: int, name: str) -> None:
    saved = SIZES["f16"] - SIZES["q2"]
    held = int(saved / MIN_SAVING) - SIZES["f16"] + 10 * more
    chosen, reason = choose_beside(held, "q2")
    assert chosen == name
    assert ("q2 would save less than a tenth" in reason) == (name == "f16")


def test_a_size_is_said_beside_that_of_f16() -> None:
    assert size_text("q4", 3 << 20, 10 << 20) == "3.0 MiB as q4, where f16 would take 10.0 MiB"
    assert size_text("dense", 10 << 20, 10 << 20) == "10.0 MiB as f16"


def test_a_named_scheme_is_held_to_the_budget() -> None:
    size = SIZES["q4"]
    assert resolve("q4", CONFIG, CTX, size, HELD, list) == (CacheSpec.parse("q4"), [])
    with raises(CacheError, field="kv_budget", match=f"kv_budget={size - 1}: q4 takes"):
        resolve("q4", CONFIG, CTX, size - 1, HELD, list)


@pytest.mark.parametrize(
    ("kv", "budget", "meant"),
    [
        ("onebit:v_bits=4", None, "onebit:v_bits=4"),
        ("q3:sink=8", 1 << 30, "planes:k_bits=3,v_bits=3,mixed_bits=true,sink=8"),
        ("f16", None, "dense"),
        (CacheSpec.parse("onebit"), None, "onebit"),
    ],
)
def test_what_is_meant(kv: str | CacheSpec | None, budget: int | None, meant: str) -> None:
    assert resolve(kv, CONFIG, CTX, budget, HELD, list) == (CacheSpec.parse(meant), [])


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_shown_by_its_name(name: str) -> None:
    assert CacheSpec.parse(PRESETS[name]).short == name
    assert CacheSpec.parse(str(CacheSpec.parse(name))) == CacheSpec.parse(name)


def test_without_the_papers_a_scheme_of_theirs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "CACHES", {"dense": registry.CACHES["dense"]})
    monkeypatch.setattr(registry, "find_spec", lambda _: None)
    with raises(CacheError, field="kv", match="kv='h1b': .* pip install edgekv"):
        CacheSpec.parse("h1b:sketch_bits=64")


def test_lists() -> None:
    assert [spec.short for spec in CacheSpec.parse_list("onebit:v_bits=4,h1b")] == ["onebit:v_bits=4", "h1b"]
    two = CacheSpec.parse_list("kivi2:bits=4,residual_length=64,dense")
    assert two == [CacheSpec.parse(text) for text in ("kivi2:bits=4,residual_length=64", "dense")]
    assert [spec.scheme.name for spec in CacheSpec.parse_list("all")] == [*SCHEMES]


def test_an_option_of_another_scheme_says_whose_it_is() -> None:
    with raises(CacheError, field="kv", match="mixed_bits applies to: planes, onebit"):
        CacheSpec.parse("dense:mixed_bits=true")
    with raises(CacheError, field="kv", match="'p' is not one of its options"):
        CacheSpec.parse("h1b:p=0")
