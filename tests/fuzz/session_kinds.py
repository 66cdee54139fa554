"""Kinds of input that are saved sessions."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from random import Random
from typing import Any

from session_parts import joined, parts

from edgekv import Session

from .material import MORE, Material, Saved
from .mutate import as_json, damaged, mutated, poisoned


def session(m: Material, folder: pathlib.Path, rng: Random) -> Session:
    """Honest checksums, lying content."""
    return _lying(m.sessions, folder, rng)


def _lying(sessions: list[Saved], folder: pathlib.Path, rng: Random) -> Session:
    data, models = rng.choice(sessions)
    content, entries, arrays = parts(data)
    what = rng.randrange(4)
    if what < 2:
        arrays = _changed(rng.choice(list(entries.values())), arrays, damaged, rng)
    elif what == 2:
        content = as_json(mutated(content, rng), rng)
    else:
        entries = mutated(entries, rng)
    return _restored(folder, joined(content, entries, arrays), rng.choice(models))


def _changed(
    entry: dict[str, Any],
    arrays: bytes,
    change: Callable[[bytes, Random], bytes],
    rng: Random,
) -> bytes:
    """The arrays with one of them changed, as many bytes as before."""
    a, b = entry["data_offsets"]
    changed = change(arrays[a:b], rng)[: b - a]
    return arrays[:a] + changed.ljust(b - a, b"\0") + arrays[b:]


def _restored(folder: pathlib.Path, data: bytes, model: Session) -> Session:
    (folder / "session").write_bytes(data)
    return Session.restore(folder / "session", model)


def resume(m: Material, folder: pathlib.Path, rng: Random) -> None:
    """A lying session that was accepted goes on."""
    _resume(session(m, folder, rng), rng)


def recurrent(m: Material, folder: pathlib.Path, rng: Random) -> None:
    """Of a model with layers that do not attend."""
    _resume(_lying(m.recurrent_sessions, folder, rng), rng)


def numbers(m: Material, folder: pathlib.Path, rng: Random) -> None:
    """NaN, infinities and huge numbers in what is saved, of every scheme and family."""
    data, models = rng.choice([*m.sessions[::2], *m.recurrent_sessions, *m.family_sessions])
    content, entries, arrays = parts(data)
    for entry in rng.sample(list(entries.values()), min(len(entries), rng.choice((1, 1, 2, 100)))):
        arrays = _changed(entry, arrays, poisoned, rng)
    restored = _restored(folder, joined(content, entries, arrays), rng.choice((*models, models[1])))
    list(restored.generate(MORE, max_new_tokens=3, temperature=rng.choice((0.0, 1.0)), seed=1))
    _resume(restored, rng)


def _resume(restored: Session, rng: Random) -> None:
    restored.prefill(MORE)
    restored.rewind(rng.randrange(len(restored.tokens)))
    restored.prefill([1])
