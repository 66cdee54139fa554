"""Takes a session file apart, and puts it together again with honest checksums."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from edgekv.checkpoint.tensors import DTYPES
from edgekv.engine.session_file import VERSION, checksum


def parts(data: bytes) -> tuple[Any, dict[str, Any], bytes]:
    """Returns content, entries of the arrays (name: dtype, shape, data_offsets), and the arrays' bytes."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    return json.loads(header.pop("__metadata__")["content"]), header, data[end:]


def joined(content: Any, entries: Any, arrays: bytes) -> bytes:
    """Returns a file's bytes; a lying entry has no honest checksum. content and entries may be bytes."""
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    try:
        crc = checksum(text, [(name, e["dtype"], e["shape"], _array(e, arrays)) for name, e in entries.items()])
    except (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError):
        crc = "0"
    metadata = {"edgekv_session": VERSION, "crc32": crc, "content": text.decode(errors="replace")}
    header = {"__metadata__": metadata, **entries} if isinstance(entries, dict) else entries
    data = json.dumps(header).encode()
    return len(data).to_bytes(8, "little") + data + arrays


def _array(entry: dict[str, Any], arrays: bytes) -> Any:
    a, b = entry["data_offsets"]
    array = np.frombuffer(arrays[a:b], np.uint8)
    if array.size != math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize:
        raise ValueError
    return array


def rewritten(
    source: pathlib.Path, target: pathlib.Path, change: Callable[[Any], Any], part: str = "content"
) -> pathlib.Path:
    """Writes the file with other content, or other ``entries``, and an honest checksum."""
    content, entries, arrays = parts(source.read_bytes())
    given = {"content": content, "entries": entries}
    changed = change(given[part])
    given |= {} if changed is None else {part: changed}
    target.write_bytes(joined(given["content"], given["entries"], arrays))
    return target


def put(path: str, value: Any) -> Callable[[Any], None]:
    """Returns a change that sets one entry: a/b/0 is content["a"]["b"][0]."""

    def change(content: Any) -> None:
        *parents, last = path.split("/")
        for key in parents:
            content = content[int(key) if isinstance(content, list) else key]
        content[int(last) if isinstance(content, list) else last] = value

    return change
