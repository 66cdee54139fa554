"""Every option of every scheme works with what it accepts, and refuses everything else in one line."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
import pytest
from cache_cases import Heads, attend_singly, draw, make, read_prompt
from helpers import SCHEMES, raises

from edgekv.errors import CacheError
from edgekv.kernels import numba_kernels
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.cache import Geometry, Workspace
from edgekv.kvcache.config import accepted_by

HEADS, TOKENS = (4, 2, 64), 230
NUMBERS = ("-1", "nan", "inf", "-inf", "1e400", "9" * 40, "9" * 5000, "x", "", "0x10", "None")
KNOBS = [(name, field) for name, scheme in SCHEMES.items() for field in dataclasses.fields(scheme.Config)]
EACH = pytest.mark.parametrize(("name", "field"), KNOBS, ids=[f"{name}:{field.name}" for name, field in KNOBS])


@EACH
def test_what_it_does_not_take_is_refused(name: str, field: dataclasses.Field[Any]) -> None:
    kind, scheme = type(field.default), SCHEMES[name]
    texts = NUMBERS if kind in (int, float) else ("9", "nan", "nope")
    for text in (*texts, *(["1.5"] if kind is int else [])):
        with raises(CacheError, field="kv") as error:
            CacheSpec.parse(f"{name}:{field.name}={text}")
        assert str(error.value).startswith(f"kv='{name}:{field.name}={text[:20]}")
        assert list(error.value.accepted or ()) == [str(each) for each in accepted_by(field).phrases]
        assert len(str(error.value)) < 300
    wrong: dict[type, tuple[object, ...]] = {int: (True, "1", 1.0, None), float: (True, "1", None, [1.0])}
    for value in wrong.get(kind, (1, None, ["f16"])):
        with pytest.raises(CacheError, match=f"{field.name}="):
            scheme.Config(**{field.name: value})


@EACH
def test_the_extremes_of_what_it_takes_work(name: str, field: dataclasses.Field[Any]) -> None:
    """They may be refused for another option, the layer or the budget."""
    scheme, accepts = SCHEMES[name], accepted_by(field)
    for value in accepts.extremes:
        assert accepts.accepts(value)
        try:
            cache = scheme(Geometry(*HEADS, TOKENS, 2, 4), scheme.Config(**{field.name: value}))
        except CacheError:
            continue
        assert cache.planned_bytes() < 40 * TOKENS * HEADS[1] * HEADS[2] + (1 << 20)
        cache.allocate(numba_kernels(None), Workspace())
        cache.mark_images([(5, 160)])
        read_prompt(cache, draw(HEADS, TOKENS), 200)
        assert np.isfinite(attend_singly(cache, draw(HEADS, TOKENS), 200)).all()


@pytest.mark.parametrize(
    ("kv", "heads", "message"),
    [
        ("tova:budget=100.5", HEADS, "budget=100.5"),
        ("snapkv:kernel=4", HEADS, "kernel=4': accepted: an odd number"),
        ("streaming:budget=4", HEADS, "budget=4.0': accepted: more than sink=4"),
        ("snapkv:budget=0.1", HEADS, "budget=0.1': accepted: observe + interval = 96"),
        ("mikv:bits=2", (2, 2, 18), "head_dim 18 must be a multiple"),
        *((kv, (2, 2, 15), f"kv='{kv}': packs 2 elements") for kv in ("h1b", "int4")),
        *((kv, (2, 2, 15), "") for kv in ("sign_keys", "dense:dtype=q8")),  # of any heads
        ("kivi2:vgroup=24", (2, 2, 64), "vgroup=24': accepted: a divisor of head_dim 64"),
        ("kivi2", (2, 2, 10), "head_dim 10 must be a multiple"),
        ("planes:k_bits=1.5,key_bits_per_head=121", HEADS, "key_bits_per_head=121': accepted: 2 digits"),
        ("planes:k_bits=1.5,key_channel_scales=4444", HEADS, "key_channel_scales=4444': accepted: 16 digits"),
        ("onebit:threshold=x", HEADS, "'threshold' is not one of its options"),
    ],
)
def test_settings_that_do_not_go_together(kv: str, heads: Heads, message: str) -> None:
    with raises(CacheError, message) if message else contextlib.nullcontext():
        make(kv, heads, 400)
