"""MiKV (Yang et al. 2024, "No token left behind"): tokens of little attention are packed instead of evicted.

Measured here (docs/papers.md): perplexity x1.001 to x1.004 of dense's, mostly by the quarter that stays in f16.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from edgekv.codecs.codec import Codec, Layout, in_package
from edgekv.kernels import Kernels
from edgekv.kernels.interface import Segment
from edgekv.kvcache.cache import Geometry, Workspace
from edgekv.kvcache.config import Config, flag, number, one_of, share_of_context
from edgekv.papers import from_half, require_whole_bytes
from edgekv.papers.evicting import LowestMassCache, are_distinct_positions, gather_tokens
from edgekv.papers.kivi import KiviValues
from edgekv.types import F32, I64, Array

SLOTS = ("key.half", "value.half", "position")
PACK_TOKENS = 512  # of a prompt, at a time: bounds the float32 copies


@dataclasses.dataclass(frozen=True)
class MiKVConfig(Config):
    """Options of `mikv`.

    budget: float, default 0.25. Tokens kept in f16: above 1 a number, up to 1 a fraction of the context.
    recent: float, default 0.5. Share of the budget that the latest tokens have, 0 to 1.
    bits: int, default 2. Bits of an element of the other tokens.
    balance: bool, default True. Whether the keys' channels are evened out before they are packed.
    """

    scheme: ClassVar[str] = "mikv"

    budget: float = share_of_context(0.25)
    recent: float = number(0.5, 0, 1)
    bits: int = one_of(2, (2, 4, 8))
    balance: bool = flag(True)


class TokenKeys(KiviValues):
    """Keys stored as `KiviValues` of one span, multiplied by ``balance`` (n_kv_heads, head_dim) before."""

    kind = "token_keys"
    backends = in_package("edgekv.papers.kivi", "cpu")
    balance: F32

    def decode(self, t0: int, t1: int) -> F32:
        return super().decode(t0, t1) / self.balance[:, None]


class MiKV(LowestMassCache):
    """MiKV: tokens that H2O keeps are in f16, tokens that it would evict in ``bits`` bits.

    Per KV head it takes slots * (4 * head_dim + 8) bytes, (capacity - slots) * (head_dim * bits / 4 + 8), 4 more
    for each packed token in a layer with a sliding window, and 4 * head_dim for the balance.

    A token is packed when it leaves the f16 slots, to which it never returns. Keys and values are packed per token
    between their least and largest element. Before that, key channels are multiplied by the paper's outlier
    balance, sqrt(max|q| / max|k|) over the prompt, and after reading divided by it. Deviation: the importance is
    summed over a query group's heads.
    """

    name = "mikv"
    version = 2  # packed keys token by token
    paper = "MiKV; FIER, appendix C"
    summary = "a quarter of the tokens, by accumulated attention and recency, in f16; the rest in 2 bits"
    tradeoff = "precision of tokens that no query has needed yet; most of its bytes are the f16 quarter"
    Config = MiKVConfig
    decay = 1.0

    def __init__(self, geometry: Geometry, config: MiKVConfig) -> None:
        super().__init__(geometry, config)
        self.recent = max(1, round(config.recent * self.slots))
        require_whole_bytes(f"mikv:bits={config.bits}", geometry.head_dim, 8 // config.bits)
        shape = geometry.n_kv_heads, geometry.capacity - self.slots, geometry.head_dim
        self._packed_keys = TokenKeys(*shape, config.bits, span=geometry.head_dim)
        self._packed_values = KiviValues(*shape, config.bits, span=geometry.head_dim)
        self.n_low = 0

    def layout(self) -> Layout:
        g, n, head_dim = self.geometry.n_kv_heads, self.geometry.capacity - self.slots, self.geometry.head_dim
        layout = {**super().layout(), "balance": ((g, head_dim), "float32")}
        if self.geometry.sliding_window is not None:
            layout["low.position"] = (g, n), "int32"
        for end, codec in self._codecs():
            layout |= {f"{end}.{name}": spec for name, spec in codec.layout().items()}
        return layout

    def _codecs(self) -> tuple[tuple[str, Codec], ...]:
        return ("low.key", self._packed_keys), ("low.value", self._packed_values)

    def allocate(self, kernels: Kernels, workspace: Workspace) -> None:
        super().allocate(kernels, workspace)
        for end, codec in self._codecs():
            codec.bind({name: self.arrays[f"{end}.{name}"] for name in codec.layout()}, kernels)
        self.arrays["balance"].fill(1)
        self._packed_keys.balance = self.arrays["balance"]

    @property
    def n_kept(self) -> int:
        return self.n_used + self.n_low

    def bytes_read(self) -> int:
        return super().bytes_read() + self.n_low * sum(codec.token_bytes for _, codec in self._codecs())

    def prefill(self, queries: F32, keys: F32, values: F32) -> None:
        """Takes a prompt's queries (n_heads, n, head_dim), keys and values (n_kv_heads, n, head_dim)."""
        if self.config.balance:
            per_head = len(keys), -1, keys.shape[2]
            q_max = np.abs(queries).reshape(per_head).max(axis=1)  # (n_kv_heads, head_dim)
            k_max = np.abs(keys).max(axis=1)
            ratio = np.divide(q_max, k_max, out=np.ones_like(q_max), where=(q_max > 0) & (k_max > 0))
            self.arrays["balance"][:] = np.sqrt(ratio)
        super().prefill(queries, keys, values)

    def _choose_slots(self) -> None:
        is_full = self.n_used == self.slots
        super()._choose_slots()
        if is_full:
            heads = np.arange(len(self._next_slots))
            self._pack({name: self.arrays[name][heads, self._next_slots][:, None] for name in SLOTS})

    def _keep_columns(self, columns: I64, keys: F32, values: F32) -> None:
        is_evicted = np.ones((len(columns), self.n_used + keys.shape[1]), bool)
        np.put_along_axis(is_evicted, columns, False, axis=1)
        evicted = np.nonzero(is_evicted)[1].reshape(len(columns), -1)
        new = self._new_tokens(keys, values)
        for a in range(0, evicted.shape[1], PACK_TOKENS):
            part = evicted[:, a : a + PACK_TOKENS]
            self._pack({name: self._gather(name, new[name], part) for name in SLOTS})
        super()._keep_columns(columns, keys, values)

    def _gather(self, name: str, new: Array, columns: I64) -> Array:
        heads = zip(self.arrays[name], new, columns, strict=True)
        return np.stack([gather_tokens(slots, self.n_used, added, chosen) for slots, added, chosen in heads])

    def _pack(self, tokens: dict[str, Array]) -> None:
        """Packs tokens, given as the slots store them: (n_kv_heads, n, ...) each."""
        keys, values = (from_half(tokens[name]) for name in ("key.half", "value.half"))
        n = keys.shape[1]
        self.kernels.encode(self._packed_keys, keys * self._packed_keys.balance[:, None], self.n_low)
        self.kernels.encode(self._packed_values, values, self.n_low)
        if self.geometry.sliding_window is not None:
            self.arrays["low.position"][:, self.n_low : self.n_low + n] = tokens["position"]
        self.n_low += n

    def segments(self) -> list[Segment]:
        """Returns the tokens in f16, then the packed ones."""
        packed = Segment(self._packed_keys, self._packed_values, 0, self.n_low, 0, self._positions("low.position"))
        return [*super().segments(), *([packed] if self.n_low else [])]

    def counters_valid(self) -> bool:
        return super().counters_valid() and self.n_low == self.n_seen - self.n_used

    def arrays_valid(self) -> bool:
        balance, positions = self.arrays["balance"], self._positions("low.position")
        are_known = positions is None or are_distinct_positions(positions[:, : self.n_low], self.n_seen)
        return super().arrays_valid() and are_known and bool((np.isfinite(balance) & (balance > 0)).all())

    def truncate(self, n: int, n_same: int = 0) -> int:
        n_seen = super().truncate(n, n_same)
        if not n_seen:
            self.arrays["balance"].fill(1)
        self.n_low = min(self.n_low, n_seen)
        return n_seen
