"""steps (ours): a bound on bytes that holds: as it fills, the oldest tokens get by with fewer bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from edgekv.errors import CacheError
from edgekv.kernels import Kernels
from edgekv.kernels.contract.segment import Segment
from edgekv.kvcache.codecs import WORD, Codec
from edgekv.kvcache.geometry import Geometry, Workspace
from edgekv.kvcache.knobs import Knobs, number, tokens
from edgekv.kvcache.tier_stores import TieredKeys, TieredValues, Tiers, described
from edgekv.kvcache.tiers import TIERS, Shape, least_bytes, tier_kinds
from edgekv.kvcache.windowed import Sizes, Windowed
from edgekv.machine import format_bytes
from edgekv.types import F32


@dataclasses.dataclass(frozen=True)
class StepsKnobs(Knobs):
    """What `steps` can be set to.

    budget: int, default 64 MiB. Bytes that the caches of all layers may take together, 1 or more.
    sink: int, default 4. First tokens of the context that stay in f16.
    residual_length: int, default 128. Latest tokens that stay in f16, at least; packed 64 at a time.
    """

    scheme: ClassVar[str] = "steps"
    aliases: ClassVar[dict[str, str]] = {"window": "residual_length"}

    budget: int = number(64 << 20, 1, 1 << 60, " bytes")
    sink: int = tokens(4)
    residual_length: int = tokens(128)


class Steps(Windowed):
    """f16 while all fits; then the oldest tokens in `planes` of 4, 3, 2, 1.5 (2-bit keys, 1-bit values) and 1 bit.

    All layers together, and the buffer that a layer is laid out anew with, take at most ``budget`` bytes at every
    moment: each layer budget / (layers + 1). A step packs as many of the oldest blocks of 64 tokens as it must for
    1/16 more tokens. What was packed finely steps down from there, through the finer code.
    """

    name = "steps"
    paper = "ours"
    summary = "f16 as long as it fits the budget, then the oldest tokens in ever fewer bits"
    gives_up = "precision of the oldest tokens, as little as the budget allows"
    Knobs = StepsKnobs
    bytes_knob = "budget"
    tidies_alike = False
    packs_like = (
        "planes:k_bits=4,v_bits=4",
        "planes:k_bits=3,v_bits=3",
        "planes",
        "planes:v_bits=1",
        "planes:k_bits=1,v_bits=1",
    )

    def exact_sizes(self, knobs: StepsKnobs) -> Sizes:
        return Sizes(sink=knobs.sink, residual_length=knobs.residual_length, block=WORD)

    def codecs(self, geometry: Geometry, capacity: int, knobs: StepsKnobs) -> tuple[Codec, Codec]:
        g, d = geometry.n_kv_heads, geometry.head_dim
        shape = Shape(g, d, geometry.n_rep)
        arena = layer_bytes(knobs.budget, geometry.n_layers) - exact_bytes(geometry, knobs)
        if arena < least_bytes(shape, capacity):
            least = (exact_bytes(geometry, knobs) + least_bytes(shape, capacity)) * (geometry.n_layers + 1)
            raise CacheError(
                f"kv_budget={knobs.budget} ({format_bytes(knobs.budget)}): {geometry.capacity} tokens need at "
                f"least {format_bytes(least)} ({least} bytes) in this model; raise it or lower `ctx`",
                field="kv_budget",
                value=knobs.budget,
                accepted=[f"{least} or more"],
            )
        self.tiers = Tiers(shape, capacity, arena)
        return TieredKeys(self.tiers, g, capacity, d), TieredValues(self.tiers, g, capacity, d)

    @classmethod
    def kinds(cls, knobs: Any) -> set[str] | None:
        """Those of all tiers."""
        return tier_kinds()

    def allocate(self, kernels: Kernels, workspace: Workspace) -> None:
        self.tiers.workspace = workspace
        super().allocate(kernels, workspace)

    def fitted(self) -> dict[str, Any]:
        return self.tiers.state()

    def load_fitted(self, fitted: Mapping[str, Any]) -> None:
        self.tiers.load_state(fitted)

    def readable(self) -> bool:
        return self.n_stored <= self.tiers.capacity

    def extend(self, keys: F32, values: F32) -> None:
        self._reserve(keys.shape[1])
        super().extend(keys, values)

    def attend(self, queries: F32, keys: F32, values: F32, sinks: F32 | None = None) -> F32:
        self._reserve(keys.shape[1])
        return super().attend(queries, keys, values, sinks)

    def is_steady(self) -> bool:
        """Unless a step is due."""
        return super().is_steady() and self._packed_then(1) <= self.tiers.capacity

    def packed(self) -> list[Segment]:
        """A segment for each store."""
        parts = self.tiers.parts(0, self.n_packed)
        return [Segment(s.keys, s.values, a - s.first, b - s.first, self.n_sink + a) for s, a, b in parts]

    def _reserve(self, n: int) -> None:
        """One step for n more tokens, so that none is packed finely only to be packed again."""
        self.tiers.reserve(self.n_stored, self._packed_then(n))

    def _packed_then(self, n: int) -> int:
        """Tokens in the tiers after n more."""
        packed = int(min(self.n_seen + n - self.sizes.sink - self.sizes.residual_length, self.bulk_capacity))
        return packed // WORD * WORD

    def truncate(self, n: int, again: int = 0) -> int:
        had_packed = self.n_stored > 0
        kept = super().truncate(n, again)
        if had_packed and not self.n_stored:  # back to the finest
            self.arrays["key.arena"][:] = 0
            self.tiers.bind(self.arrays["key.arena"], self.kernels)
        return kept

    def bytes_read(self) -> int:
        """What the visible tokens take: a step reads all of it."""
        reach = min(self.n_seen, self.geometry.sliding_window or self.n_seen)
        exact = min(reach, self.n_recent) + max(0, reach - self.n_recent - self.n_packed)
        first = self.n_packed - min(self.n_packed, max(0, reach - self.n_recent))
        parts = self.tiers.parts(first, self.n_packed)
        packed = sum((b - a) * store.block_bytes // WORD for store, a, b in parts)
        return exact * 4 * self.geometry.n_kv_heads * self.geometry.head_dim + packed

    def notes(self) -> list[str]:
        held = [(b - a, store.tier.name) for store, a, b in self.tiers.parts(0, self.n_packed)]
        now = ", ".join(f"{n} tokens in {name}" for n, name in held)
        log = [entry for entry in self.tiers.log if entry[1] != TIERS[0].name]
        steps = f"stepped down: {described(log)}" if log else "everything in f16 so far"
        exact = f"{self.n_sink + self.n_recent} exact"
        return [f"kv budget {format_bytes(self.knobs.budget)}: {steps}; now {now + ', ' if now else ''}{exact}"]


def layer_bytes(budget: int, n_layers: int) -> int:
    """One layer's share; the last share is the buffer that all layers step with."""
    return budget // (n_layers + 1)


def exact_bytes(geometry: Geometry, knobs: StepsKnobs) -> int:
    """The first and the latest tokens of a layer, in f16."""
    recent, sink = (min(geometry.capacity, n) for n in (knobs.residual_length + WORD, knobs.sink))
    return 4 * geometry.n_kv_heads * geometry.head_dim * (sink + recent)
