"""`--kv auto`: the best scheme that fits, and why."""

import pytest

from edgekv.checkpoint.shapes import load_shape
from edgekv.errors import CacheError
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.auto import AUTO, check_budget, choose, planned_bytes
from edgekv.models import architecture

CONFIG = architecture(load_shape("llama3.2-1b")).config
CTX = 8192
SIZES = [planned_bytes(CacheSpec.parse(text), CONFIG, CTX) for text in AUTO]


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
    with pytest.raises(CacheError, match=f"{SIZES[-1]} bytes"):
        choose(CONFIG, CTX, SIZES[-1] - 1)


def test_a_named_scheme_is_held_to_the_budget() -> None:
    spec = CacheSpec.parse("dense")
    check_budget(spec, CONFIG, CTX, SIZES[0])
    with pytest.raises(CacheError, match="more than --kv-budget"):
        check_budget(spec, CONFIG, CTX, SIZES[0] - 1)
