"""The hash of a file's whole content, made once: it is remembered for as long as the file stays as it was."""

from __future__ import annotations

import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from edgekv.cache_folder import Memo
from edgekv.errors import CheckpointError
from edgekv.files import open_regular
from edgekv.machine import all_cores
from edgekv.types import TaskProgress

TASK = "hashing"
SPAN_BYTES, READ_BYTES = 8 << 20, 1 << 20  # that a thread hashes at a time, and reads
MOST_REMEMBERED = 256
SETTLED_NS = 2_000_000_000  # a file changed later than so long before may change again without showing it


def content_hash(path: Path, opened: os.stat_result, progress: TaskProgress | None = None) -> str:
    """A SHA-256 over the hashes of all spans of a file, in hex.

    opened: its status when it was opened. Raises CheckpointError where it has changed since, or can't be read.
    """
    known = Memo("hashes.json", 1)
    place, facts = os.path.realpath(path), _facts(opened)
    remembered = known.read() or {}
    if remembered.get(place, [])[:-1] == facts:
        return str(remembered[place][-1])
    begun_ns = time.time_ns()
    try:
        with open_regular(path) as file:
            found = hash_spans(file.fileno(), opened.st_size, progress)
            is_same = _facts(os.fstat(file.fileno())) == facts
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}); try again") from error
    if not is_same:
        raise CheckpointError(f"{path}: changed while it was in use; try again when it is whole")
    if abs(begun_ns - opened.st_ctime_ns) > SETTLED_NS:
        others = {key: value for key, value in (known.read() or {}).items() if key != place}
        latest = dict(list(others.items())[1 - MOST_REMEMBERED :])
        known.keep(latest | {place: [*facts, found]})
    return found


def hash_spans(descriptor: int, nbytes: int, progress: TaskProgress | None = None) -> str:
    """As `content_hash`, of an open file; read and hashed by all cores together. Raises OSError."""

    def span(start: int) -> bytes:
        digest = hashlib.sha256()
        for at in range(start, end := min(start + SPAN_BYTES, nbytes), READ_BYTES):
            data = os.pread(descriptor, min(READ_BYTES, end - at), at)
            if len(data) < min(READ_BYTES, end - at):
                raise OSError(0, "it ends before its size")
            digest.update(data)
        return digest.digest()

    whole = hashlib.sha256(nbytes.to_bytes(8, "little"))
    starts = range(0, nbytes, SPAN_BYTES)
    with ThreadPoolExecutor(all_cores()) as pool:
        for start, digest in zip(starts, pool.map(span, starts), strict=True):
            whole.update(digest)
            if progress and nbytes > SPAN_BYTES:
                progress(TASK, min(start + SPAN_BYTES, nbytes), nbytes)
    return whole.hexdigest()


def _facts(status: os.stat_result) -> list[int]:
    """What changes with a file's content: no program can set the last of them."""
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
