"""Kinds of input that are saved sessions."""

from __future__ import annotations

import json
import pathlib
import zlib
from random import Random

from edgekv import Session
from edgekv.session.file import MAGIC, PREFIX, VERSION

from .material import MORE, Material, Saved
from .mutate import as_json, damaged, mutated


def session(m: Material, folder: pathlib.Path, rng: Random) -> Session:
    """Honest checksums, lying content."""
    return _lying(m.sessions, folder, rng)


def _lying(sessions: list[Saved], folder: pathlib.Path, rng: Random) -> Session:
    data, models = rng.choice(sessions)
    size = PREFIX.unpack_from(data)[3]
    header = json.loads(data[PREFIX.size : PREFIX.size + size])
    arrays = data[PREFIX.size + size :]
    if rng.random() < 0.5:
        blob, position = rng.choice(header["blobs"]), 0
        for each in header["blobs"]:
            if each is blob:
                break
            position += each["size"]
        changed = damaged(arrays[position : position + blob["size"]], rng)
        arrays = arrays[:position] + changed + arrays[position + blob["size"] :]
        blob |= {"size": len(changed), "crc": zlib.crc32(changed)}
        text = json.dumps(header).encode()
    else:
        part = rng.choice(("content", "blobs", None))
        header = header | {part: mutated(header[part], rng)} if part else mutated(header, rng)
        text = as_json(header, rng)
    prefix = PREFIX.pack(MAGIC, VERSION, zlib.crc32(text), len(text))
    (folder / "session").write_bytes(prefix + text + arrays)
    return Session.restore(folder / "session", rng.choice(models))


def resume(m: Material, folder: pathlib.Path, rng: Random) -> None:
    """A lying session that was accepted goes on."""
    _resume(session(m, folder, rng), rng)


def recurrent(m: Material, folder: pathlib.Path, rng: Random) -> None:
    """Of a model with layers that do not attend."""
    _resume(_lying(m.recurrent_sessions, folder, rng), rng)


def _resume(restored: Session, rng: Random) -> None:
    restored.prefill(MORE)
    restored.rewind(rng.randrange(len(restored.tokens)))
    restored.prefill([1])
