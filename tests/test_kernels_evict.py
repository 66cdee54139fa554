"""Which token leaves, by the definition; and scores of packed tokens."""

import numpy as np
import pytest
from kernel_cases import bound, normal

from edgekv.kernels import cpu, reference
from edgekv.papers.evicting import highest, lowest
from edgekv.papers.evicting.mikv import TokenKeys


@pytest.mark.parametrize(("visible", "n_kv_heads", "n"), [(-5, 2, 70), (0, 3, 129), (9, 32, 200), (9, 1, 1)])
def test_the_lowest_goes_the_oldest_of_equals(visible: int, n_kv_heads: int, n: int) -> None:
    rng = np.random.default_rng(2)
    positions = np.argsort(rng.random((n_kv_heads, n)), axis=1).astype(np.int32)
    mass = (rng.integers(1, 5, (n_kv_heads, n)) / 4).astype(np.float32)  # many ties
    protected = max(1, n // 2)
    slots = lowest(mass, positions, visible, protected)
    for g in range(n_kv_heads):
        candidates = [t for t in range(n) if positions[g, t] < protected]
        expected = min(candidates, key=lambda t: (positions[g, t] >= visible and mass[g, t], positions[g, t]))
        assert slots[g] == expected


def test_mass_that_is_no_number_counts_as_none() -> None:
    """As in `highest`, which says what is left; infinity is the most, and what is protected stays before it."""
    pool = np.array([np.nan, -np.float32(np.nan), np.inf, -1, 0, 0.5, 2], np.float32)
    mass = np.random.default_rng(3).choice(pool, (40, 12))
    mass[0], mass[1] = np.nan, np.inf
    positions = np.tile(np.arange(12, dtype=np.int32), (40, 1))
    left, slots = highest(mass, positions, 11, 2, 9), lowest(mass, positions, 2, 9)
    assert (slots < 2).all()
    for g in range(40):
        assert np.setdiff1d(np.arange(12), left[g]).tolist() == [slots[g]]
    slots = lowest(mass, positions, 0, 9)
    for g, row in enumerate(np.where(mass[:, :9] > 0, mass[:, :9], 0)):
        assert slots[g] == row.argmin()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_keys_are_stored_times_the_balance(bits: int) -> None:
    rng = np.random.default_rng(bits)
    n_bytes, mask, codec = 16 * bits // 8, 2**bits - 1, TokenKeys(1, 40, 16, bits, 16)
    codes = rng.integers(0, 256, (1, 40, n_bytes), np.uint8)
    step, low = rng.random((2, 1, 1, 40)).astype(np.float16)
    codec.balance = rng.uniform(0.5, 2, (1, 16)).astype(np.float32)
    bound(codec, codes=codes, step=step.view(np.uint16), low=low.view(np.uint16))
    q = normal(rng, 1, 3, 16)
    for backend in (reference, cpu):
        s = np.empty((1, 3, 30), np.float32)
        backend.scores(codec, q, 5, 35, s)
        for t in range(5, 35):
            stored = [codes[0, t, d % n_bytes] >> d // n_bytes * bits & mask for d in range(16)]
            key = float(low[0, 0, t]) + float(step[0, 0, t]) * np.array(stored)
            np.testing.assert_allclose(s[0, :, t - 5], q[0] / codec.balance @ key, rtol=1e-4, atol=1e-4)
