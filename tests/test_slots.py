"""Conversations that decode together say what each says alone."""

from __future__ import annotations

import pathlib

import golden_cases
import numpy as np
import pytest

from edgekv import Session


@pytest.mark.parametrize("case", ["llama31", "gpt2", "rope-dynamic"])
@pytest.mark.parametrize("kv", ["dense", "onebit", "h2o"])
def test_a_pass_of_several_conversations(case: str, kv: str, tmp_path: pathlib.Path) -> None:
    """Of different lengths, their tokens in one pass of the linear layers."""
    model = golden_cases.write_checkpoint(case, tmp_path)
    first = Session.load(model, kv=kv, weights="f32")
    sessions = [first, first.fork(), first.fork()]
    tokens = golden_cases.tokens(case)
    for n, session in zip((5, 20, 11), sessions, strict=True):
        session.prefill(tokens[:n])
    alone = [session.fork() for session in sessions]
    for session, other in zip(sessions, alone, strict=True):
        other.copy_from(session)
    for token in tokens[:8]:
        expected = [other.decoder.step(token, other.state.caches).copy() for other in alone]
        together = first.decoder.step_together([token] * 3, [session.state.caches for session in sessions])
        np.testing.assert_allclose(together, expected, atol=2e-3)
