"""What a session file holds: the conversation, its compressed cache, and what both belong to."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from edgekv import __version__
from edgekv.errors import CacheError, SessionError
from edgekv.kernels.memory import to_host
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.base import KVCache
from edgekv.kvcache.steps import parse_kv
from edgekv.session.file import SessionFile, write
from edgekv.session.model import Model
from edgekv.session.prompt import Span, Spans
from edgekv.session.sampling import Sampler, SamplingParams

if TYPE_CHECKING:
    from edgekv.session.session import Session


def save(session: Session, path: str | os.PathLike[str], compress: bool) -> int:
    """Writes the session's state whole or not at all; returns the file's bytes."""
    states = [cache.state() for cache in session.caches]
    sampler = session.sampler
    content = {
        "edgekv": __version__,
        "model": session.model.path.name,
        "identity": session.model.identity,
        "weights": session.plan.weights,
        "kv": str(session.plan.kv),
        "kv_version": session.plan.kv.scheme.version,
        "ctx": session.plan.ctx,
        "tokens": session.tokens,
        "spans": [(span.start, span.stop, span.modality) for span in session.spans],
        "sampler": sampler and {"params": dataclasses.asdict(sampler.params), "state": sampler.state()},
        "memo": session.memo,
        "n_dropped": session.n_dropped,
        "layers": [{"counters": state.counters, "fitted": state.fitted} for state in states],
    }
    arrays = {f"{i}/{name}": to_host(a) for i, state in enumerate(states) for name, a in state.arrays.items()}
    arrays |= {f"span/{i}": span.rows for i, span in enumerate(session.spans)}
    return write(path, content, arrays, "huffman" if compress else "plain")


class Saved:
    """An opened session file: undamaged, and written by an edgekv that this one understands.

    Raises SessionError otherwise.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.file = SessionFile(path)
        content = self.file.content
        try:
            self.model, self.identity = str(content["model"]), str(content["identity"])
            self.weights, self.ctx = str(content["weights"]), int(content["ctx"])
            self.tokens: list[int] = [int(token) for token in content["tokens"]]
            self._spans = [(int(a), int(b), str(modality)) for a, b, modality in content.get("spans", ())]
            self.kv = parse_kv(content["kv"])
            self._kv_version = int(content["kv_version"])
            self.n_dropped = int(content["n_dropped"])
            self._sampler, self.memo = content["sampler"], dict(content["memo"])
            self._layers: list[dict[str, Any]] = list(content["layers"])
        except (KeyError, TypeError, ValueError, CacheError) as error:
            raise self._foreign(error) from error
        if not all(0 <= a < b <= len(self.tokens) for a, b, _ in self._spans):
            raise self._foreign(f"embeddings at {self._spans} of {len(self.tokens)} tokens")
        if self._kv_version != self.kv.scheme.version:
            raise self._foreign(f"version {self._kv_version} of {self.kv.scheme.name}")

    def require_model(self, model: Model) -> None:
        """Raises SessionError unless the session was held with these very weights."""
        if model.identity != self.identity:
            raise SessionError(
                f"{self.file.path}: belongs to the model {self.model} with identity {self.identity}, not to "
                f"{model.path.name} with {model.identity}; give that model (and adapter), or start a new session"
            )

    def require_weights(self, weights: str) -> None:
        """Raises SessionError unless the weights have the session's format, on which every next token depends."""
        if weights != self.weights:
            raise SessionError(
                f"{self.file.path}: was held with {self.weights} weights, not {weights}; give --weights "
                f"{self.weights}, or start a new session"
            )

    def require_scheme(self, kv: CacheSpec | None, ctx: int | None) -> None:
        """Raises SessionError unless scheme, knobs and context, where they are given, are the session's."""
        for option, found, given in (("--kv", self.kv, kv), ("--ctx", self.ctx, ctx)):
            if given is not None and found != given:
                raise SessionError(
                    f"{self.file.path}: was held with {option} {found}, not {given}; leave {option} out, or start "
                    "a new session"
                )

    def fill(self, caches: Sequence[KVCache], hidden_size: int) -> Spans:
        """Puts the saved state into a session's allocated, empty caches; returns the conversation's embeddings.

        Raises SessionError if it can't fit.
        """
        if len(self._layers) != len(caches):
            raise self._foreign(f"{len(self._layers)} layers, not {len(caches)}")
        layers = enumerate(zip(caches, self._layers, strict=True))
        arrays = {f"{i}/{k}": a for i, (cache, layer) in layers for k, a in self._prepared(cache, layer).items()}
        spans = [Span(a, np.zeros((b - a, hidden_size), np.float32), kind) for a, b, kind in self._spans]
        arrays |= {f"span/{i}": span.rows for i, span in enumerate(spans)}
        self.file.require(arrays)
        for name, array in arrays.items():
            host = to_host(array)
            self.file.fill(name, host)
            if host is not array:
                array[...] = np.asarray(host, like=array)
        return spans

    def _prepared(self, cache: KVCache, layer: dict[str, Any]) -> dict[str, Any]:
        counters, empty = layer["counters"], cache.state().counters
        if counters.keys() != empty.keys() or not all(
            0 <= n <= cache.geometry.capacity for n in counters.values()
        ):
            raise self._foreign(f"counters {counters}")
        try:
            return cache.prepare(counters, layer["fitted"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._foreign(error) from error

    def sampler(self, vocab_size: int) -> Sampler | None:
        """The sampler of the last text, which goes on with its series of random numbers."""
        if self._sampler is None:
            return None
        try:
            sampler = Sampler(SamplingParams(**self._sampler["params"]), vocab_size)
        except (KeyError, TypeError) as error:
            raise self._foreign(error) from error
        sampler.load_state(self._sampler["state"])
        return sampler

    def _foreign(self, what: object) -> SessionError:
        return SessionError(
            f"{self.file.path}: written by edgekv {self.file.content.get('edgekv')}, which this one (edgekv "
            f"{__version__}) can't take over ({what}); open it with that, or start a new session"
        )
