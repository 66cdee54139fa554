"""Kinds of input that are saved sessions."""

from __future__ import annotations

import json
import pathlib
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

from edgekv import Session
from edgekv.session.file import MAGIC, PREFIX, VERSION

from .material import MORE, Material, Saved
from .mutate import as_json, damaged, mutated, poisoned


def session(m: Material, folder: pathlib.Path, rng: Random) -> Session:
    """Honest checksums, lying content."""
    return _lying(m.sessions, folder, rng)


def _lying(sessions: list[Saved], folder: pathlib.Path, rng: Random) -> Session:
    data, models = rng.choice(sessions)
    header, arrays = _parts(data)
    if rng.random() < 0.5:
        arrays = _changed(rng.choice(header["blobs"]), header, arrays, damaged, rng)
        text = json.dumps(header).encode()
    else:
        part = rng.choice(("content", "blobs", None))
        header = header | {part: mutated(header[part], rng)} if part else mutated(header, rng)
        text = as_json(header, rng)
    return _restored(folder, text, arrays, rng.choice(models))


def _parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    """A session file's header and arrays."""
    end = PREFIX.size + PREFIX.unpack_from(data)[3]
    return json.loads(data[PREFIX.size : end]), data[end:]


def _changed(
    blob: dict[str, Any],
    header: dict[str, Any],
    arrays: bytes,
    change: Callable[[bytes, Random], bytes],
    rng: Random,
) -> bytes:
    """The arrays with one of the header's changed, whose entry says so."""
    position = sum(each["size"] for each in header["blobs"][: header["blobs"].index(blob)])
    end = position + blob["size"]
    changed = change(arrays[position:end], rng)
    blob |= {"size": len(changed), "crc": zlib.crc32(changed)}
    return arrays[:position] + changed + arrays[end:]


def _restored(folder: pathlib.Path, text: bytes, arrays: bytes, model: Session) -> Session:
    prefix = PREFIX.pack(MAGIC, VERSION, zlib.crc32(text), len(text))
    (folder / "session").write_bytes(prefix + text + arrays)
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
    header, arrays = _parts(data)
    for blob in rng.sample(header["blobs"], min(len(header["blobs"]), rng.choice((1, 1, 2, 100)))):
        arrays = _changed(blob, header, arrays, poisoned, rng)
    restored = _restored(folder, json.dumps(header).encode(), arrays, rng.choice((*models, models[1])))
    list(restored.generate(MORE, max_new_tokens=3, temperature=rng.choice((0.0, 1.0)), seed=1))
    _resume(restored, rng)


def _resume(restored: Session, rng: Random) -> None:
    restored.prefill(MORE)
    restored.rewind(rng.randrange(len(restored.tokens)))
    restored.prefill([1])
