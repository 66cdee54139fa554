"""Every option of every scheme works with what it accepts, and refuses everything else in one line."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from cache_cases import draw
from helpers import SCHEMES

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
        with pytest.raises(CacheError) as error:
            CacheSpec.parse(f"{name}:{field.name}={text}")
        assert str(error.value).startswith(f"kv='{name}:{field.name}={text[:20]}")
        assert error.value.field == "kv"
        assert list(error.value.accepted or ()) == [str(each) for each in accepted_by(field).phrases]
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 300
    wrong: dict[type, tuple[object, ...]] = {int: (True, "1", 1.0, None), float: (True, "1", None, [1.0])}
    for value in wrong.get(kind, (1, None, ["f16"])):
        with pytest.raises(CacheError, match=f"{field.name}="):
            scheme.Config(**{field.name: value})


@EACH
def test_the_extremes_of_what_it_takes_work(name: str, field: dataclasses.Field[Any]) -> None:
    """They may be refused for another option, the layer or the budget."""
    scheme, accepts = SCHEMES[name], accepted_by(field)
    q, k, v = draw(HEADS, TOKENS)
    for value in accepts.extremes:
        assert accepts.accepts(value)
        try:
            cache = scheme(Geometry(*HEADS, TOKENS, 2, 4), scheme.Config(**{field.name: value}))
        except CacheError:
            continue
        assert cache.planned_bytes() < 40 * TOKENS * HEADS[1] * HEADS[2] + (1 << 20)
        cache.allocate(numba_kernels(None), Workspace())
        cache.mark_images([(5, 160)])
        cache.prefill(q[:, :200], k[:, :200], v[:, :200])
        type(cache).finish_prefill([cache])
        for i in range(200, TOKENS):
            out = cache.attend(q[:, i : i + 1], k[:, i : i + 1], v[:, i : i + 1])
            assert np.isfinite(out).all()
