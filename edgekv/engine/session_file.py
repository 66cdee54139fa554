"""Session files: saving a session, and restoring it from contents that are not trusted."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from edgekv.checkpoint.tensors import DTYPES, Tensor, Tensors, TensorWriter
from edgekv.checks import Count, Natural
from edgekv.engine.loading import SessionPlan
from edgekv.engine.model import Model
from edgekv.engine.runner import EmbeddingSpan, State, used_slices
from edgekv.engine.sampling import Sampler, SamplingParams
from edgekv.errors import CacheError, CheckpointError, ConfigError, SessionError, short_repr
from edgekv.files import user_path
from edgekv.kernels.arrays import to_host
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.cache import LayerState
from edgekv.machine import __version__
from edgekv.models.config import ModelConfig
from edgekv.types import Array

VERSION = "2"
FILE_OPTIONS = "kv", "ctx", "weights"  # options that a file has by itself
DAMAGE_ERRORS = KeyError, TypeError, ValueError, AttributeError, OverflowError  # of foreign content
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def checksum(content: bytes, arrays: Iterable[tuple[str, str, Sequence[int], Array]]) -> str:
    """Returns the CRC-32 (hex) of a session's JSON and its arrays: name, safetensors type, shape, elements."""
    crc = zlib.crc32(content)
    for name, dtype, shape, array in arrays:
        crc = zlib.crc32(f"{name} {dtype} {list(shape)}".encode(), crc)
        crc = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, crc)
    return f"{crc:08x}"


def fixed_checksum(caches: Iterable[LayerState]) -> str:
    """Returns the CRC-32 (hex) of rotations and projections that no file contains: other ones misread its bits.

    They are rounded, as BLAS libraries differ in the last bits.
    """
    crc = 0
    for array in (array for cache in caches for array in cache.fixed()):
        crc = zlib.crc32(np.rint(array * 4096).astype("<i4").tobytes(), crc)
    return f"{crc:08x}"


def write(
    path: str | os.PathLike[str],
    content: Mapping[str, Any],
    arrays: Mapping[str, Array],
    between: Callable[[bool], None] = lambda is_copied: None,
) -> int:
    """Writes ``content`` (JSON) and C-contiguous arrays (n, ...), cut to the part in use, as a safetensors file.

    The file is written whole or not at all. between: is called with False before each array, where it may raise
    to stop, and with True once, when the arrays are no longer needed, before the file is made durable.
    Returns its bytes. Raises CheckpointError when it can't be written, SessionError for content that is no JSON.
    """
    try:
        text = json.dumps(content, allow_nan=False, ensure_ascii=False)
        encoded = text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SessionError(
            f"{path}: the session's memo is no JSON ({error}); keep texts, finite numbers, lists and dicts in it",
            field="memo",
        ) from None

    def interruptible(some: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
        for item in some.items():
            between(False)
            yield item

    used = {name: array[used_slices(array)] for name, array in interruptible(arrays)}
    specs = {name: (DTYPE_NAMES[array.dtype], array.shape) for name, array in used.items()}
    crc = checksum(encoded, ((name, *specs[name], array) for name, array in interruptible(used)))
    metadata = {"edgekv_session": VERSION, "crc32": crc, "content": text}
    with TensorWriter(user_path(path), specs, metadata, private=True) as file:
        for name, array in interruptible(used):
            file.write(name, array)
        between(True)
    return file.nbytes


def require_session_file(path: str | os.PathLike[str]) -> None:
    """Raises SessionError for a file that is no session, which would be lost if one was written to it."""
    try:
        SessionFile(path, is_checked=False)
    except SessionError as error:
        raise SessionError(f"{os.fspath(path)}: holds something else than a session: give another file") from error


class SessionFile:
    """An opened session file whose checksum is right, if that ``is_checked``. content: its JSON.

    Raises SessionError when it is missing, foreign, of another version, truncated or damaged.
    """

    def __init__(self, path: str | os.PathLike[str], is_checked: bool = True) -> None:
        self.path = user_path(path)
        try:
            self._tensors = Tensors.open(self.path)
        except CheckpointError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise self._error("there is no such file") from error
            raise self._error(f"can't be read, or is damaged ({str(error.__cause__ or error)[:200]})") from error
        metadata = self._tensors.files[0].metadata
        if "edgekv_session" not in metadata:
            raise self._error("is no edgekv session")
        if metadata["edgekv_session"] != VERSION:
            found = short_repr(metadata["edgekv_session"])
            raise self._error(f"has format version {found}, this edgekv reads {VERSION}")
        content = metadata.get("content", "").encode(errors="replace")
        try:
            if is_checked:
                arrays = ((name, x.dtype, x.shape, x.read()) for name, x in self._tensors.items())
                if metadata.get("crc32") != checksum(content, arrays):
                    raise self._error("is damaged: its content does not match its checksum")
            self.content: dict[str, Any] = msgspec.json.decode(content, type=dict[str, Any])  # refuses NaN
        except (CheckpointError, ValueError, RecursionError) as error:
            raise self._error(f"is damaged ({short_repr(str(error))})") from None

    def fill(self, arrays: Mapping[str, Any]) -> None:
        """Fills arrays (n, ...), which may lie on a device, with the saved ones; the rest of each becomes zero.

        Raises SessionError, before any is filled, unless the file has arrays of just these names and types, none
        larger than these.
        """
        for name in sorted(self._tensors.keys() | arrays.keys()):
            stored, array = self._tensors.get(name), arrays.get(name)
            if stored is None or array is None or not _fits(stored, array):
                found = "absent" if stored is None else f"{stored.dtype} {stored.shape}"
                needed = "none" if array is None else f"{array.dtype.str} {array.shape}"
                raise SessionError(
                    f"{self.path}: array {short_repr(name)} is {found}, this edgekv needs {needed}; the file was "
                    "written by another version: open it with that, or start a new session"
                )
        for name, array in arrays.items():
            host, saved = to_host(array), self._tensors[name].read()
            for axis, n in enumerate(saved.shape):
                rest = np.moveaxis(host, axis, 0)[n:]
                if rest.any():  # a write would take memory that zeros don't need
                    rest[...] = 0
            host[tuple(map(slice, saved.shape))] = saved
            if host is not array:
                array[...] = np.asarray(host, like=array)

    def _error(self, what: str) -> SessionError:
        advice = "give a session's file, or start a new session"
        return SessionError(what, field="session", value=str(self.path), advice=advice)


def _fits(stored: Tensor, array: Any) -> bool:
    is_type = DTYPES[stored.dtype] == array.dtype and len(stored.shape) == array.ndim
    return is_type and all(n <= most for n, most in zip(stored.shape, array.shape, strict=True))


def save_state(
    path: str | os.PathLike[str],
    state: State,
    model: Model,
    lora: str | None,
    plan: SessionPlan,
    between: Callable[[bool], None] = lambda is_copied: None,
) -> int:
    """Writes a state to a session file; returns its bytes.

    lora: the name of the LoRA beside the weights. between: as of `write`.
    """
    state.drop_drafts()
    layers = [cache.state() for cache in state.caches]
    sampler = state.sampler
    content = {
        "edgekv": __version__,
        "model": model.name,
        "identity": model.identity,
        "lora": model.lora_text(lora),
        "weights": plan.weights,
        "kv": str(plan.kv),
        "kv_version": plan.kv.scheme.version,
        "ctx": plan.ctx,
        "tokens": state.tokens,
        "spans": [(span.start, span.stop, span.modality) for span in state.spans],
        "sampler": sampler and {"params": sampler.params.as_dict(), "state": sampler.state()},
        "memo": state.memo,
        "n_dropped": state.n_dropped,
        "fixed": fixed_checksum(state.caches),
        "layers": [{"counters": layer.counters, "fitted": layer.extra} for layer in layers],
    }
    arrays = {f"{i}/{name}": to_host(a) for i, layer in enumerate(layers) for name, a in layer.arrays.items()}
    arrays |= {f"span/{i}": span.rows for i, span in enumerate(state.spans)}
    return write(path, content, arrays, between)


class SavedContent(msgspec.Struct):
    """The JSON of a session file."""

    model: str
    identity: str
    weights: str
    kv: str
    kv_version: int
    ctx: Count
    tokens: list[Natural]
    sampler: dict[str, Any] | None
    memo: dict[str, Any]
    n_dropped: Natural
    layers: list[dict[str, Any]]
    lora: str | None = None
    spans: list[tuple[int, int, str]] = []
    fixed: str | None = None  # absent in older files, which have the present ones


class SavedState(SessionFile):
    """A session file of this version of edgekv and of the KV scheme. Raises SessionError for any other."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        try:
            self._saved = saved = msgspec.convert(self.content, SavedContent)
            self.kv = CacheSpec.parse(saved.kv)
        except (ValueError, CacheError) as error:
            raise self._incompatible(error) from error
        self.ctx, self.weights, self.tokens = saved.ctx, saved.weights, saved.tokens
        ends = [0, *(b for _, b, _ in saved.spans)]
        if not all(end <= a < b <= len(self.tokens) for end, (a, b, _) in zip(ends, saved.spans, strict=False)):
            raise self._incompatible(f"embeddings at {short_repr(saved.spans)} of {len(self.tokens)} tokens")
        if saved.kv_version != self.kv.scheme.version:
            raise self._incompatible(f"version {saved.kv_version} of {self.kv.scheme.name}")

    def require(self, kv: str | CacheSpec | None, ctx: int | None, weights: str) -> None:
        """Raises SessionError unless it was written with these options; None and "auto" accept any."""
        if kv not in (None, "auto"):
            spec = CacheSpec.parse(kv) if isinstance(kv, str) else kv
            if spec != self.kv.without_fit and str(spec) != str(self.kv):
                raise self._other("kv", self.kv.short, spec.short)
        for field, found, given in (("ctx", self.ctx, ctx), ("weights", self.weights, weights)):
            if given not in (None, "auto", found):
                raise self._other(field, found, given)

    def require_model(self, model: Model) -> str | None:
        """Returns the name of its LoRA among the model's ``loras``, or None where it has none beside the weights.

        Raises SessionError unless it was written with these very weights.
        """
        saved, names = self._saved, {model.lora_text(name): name for name in (*model.loras, None)}
        if saved.lora not in names:
            raise self._other("lora", _lora_text(saved.lora), " or ".join(map(_lora_text, names)))
        if model.identity != saved.identity:
            same = " with other weights" if saved.model == model.name else ""
            raise self._other("model", f"the model {saved.model}{same}", model.name)
        if not all(0 <= token < model.config.vocab_size for token in self.tokens):
            raise self._incompatible(f"tokens outside the vocabulary of {model.config.vocab_size}")
        return names[saved.lora]

    def open_state(self, state: State, config: ModelConfig) -> None:
        """Fills a new state, whose caches are allocated and empty.

        Raises SessionError for a file that does not fit; the state can't be used then.
        """
        saved, caches, sampler = self._saved, state.caches, self._sampler(config.vocab_size)
        if len(saved.layers) != len(caches):
            raise self._incompatible(f"{len(saved.layers)} layers, not {len(caches)}")
        if saved.fixed not in (None, fixed_checksum(caches)):
            raise self._incompatible("rotations that another NumPy or another adapter made")
        layers = enumerate(zip(caches, saved.layers, strict=True))
        arrays = {f"{i}/{k}": a for i, (cache, layer) in layers for k, a in self._prepare(cache, layer).items()}
        spans = [
            EmbeddingSpan(a, np.zeros((b - a, config.hidden_size), np.float32), kind) for a, b, kind in saved.spans
        ]
        self.fill(arrays | {f"span/{i}": span.rows for i, span in enumerate(spans)})
        lengths = {cache.n_seen for cache in caches}
        if len(lengths) != 1 or max(lengths) > len(self.tokens):
            raise self._incompatible(f"layers of {sorted(lengths)} tokens, {len(self.tokens)} in all")
        unreadable = [i for i, cache in enumerate(caches) if not cache.arrays_valid()]
        if unreadable:
            raise self._incompatible(f"what layer {unreadable[0]} holds")
        state.tokens, state.spans, state.memo, state.sampler = list(self.tokens), spans, saved.memo, sampler
        state.n_dropped = saved.n_dropped

    def _prepare(self, cache: LayerState, layer: dict[str, Any]) -> dict[str, Any]:
        try:
            counters, empty = layer["counters"], cache.state().counters
            if counters.keys() != empty.keys() or not all(
                type(n) is int and 0 <= n <= cache.capacity for n in counters.values()
            ):
                raise self._incompatible(f"counters {short_repr(counters)}")
            return cache.restore(counters, layer["fitted"])
        except DAMAGE_ERRORS as error:
            raise self._incompatible(error) from error

    def _sampler(self, vocab_size: int) -> Sampler | None:
        saved = self._saved.sampler
        if saved is None:
            return None
        try:
            sampler = Sampler(SamplingParams(**saved["params"]), vocab_size)
            sampler.load_state(saved["state"])
        except (*DAMAGE_ERRORS, ConfigError) as error:
            raise self._incompatible(error) from error
        return sampler

    def _other(self, field: str, saved: object, requested: object) -> SessionError:
        return SessionError(
            f"{self.path} has {str(saved)[:200]}",
            field=field,
            value=requested,
            advice=f"{f'leave {{{field}}} out' if field in FILE_OPTIONS else 'give that'}, or start a new session",
        )

    def _incompatible(self, what: object) -> SessionError:
        return SessionError(
            f"{self.path}: written by edgekv {self.content.get('edgekv')}, which this one (edgekv {__version__}) "
            f"can't take over ({str(what)[:200]}); open it with that, or start a new session"
        )


def _lora_text(lora: str | None) -> str:
    return "no LoRA" if lora is None else f"the LoRA {lora:.200}"
