"""Packed tokens in two stores of different precision within a fixed number of bytes; the older ones step down.

Four tiers, TIERS: as tokens arrive, the oldest blocks of the finer store are packed more coarsely, and once all
are, the next coarser tier begins. Everything lies in one array, the arena, which is laid out anew at each step.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from edgekv.errors import CacheError
from edgekv.kernels import Kernels
from edgekv.kernels.aligned import CACHE_LINE_BYTES
from edgekv.kernels.memory import contiguous
from edgekv.kvcache.base import Layout, Workspace, layout_bytes
from edgekv.kvcache.codec_planes import CentredPlanes, InterleavedValues, PlaneKeys, PlaneValues
from edgekv.kvcache.codecs import F16, WORD, Codec
from edgekv.types import F32, Array

CONVERT_TOKENS = 512  # decoded at a time: bounds the float32 copies
GROWTH, LEAST_GROWTH = 16, 256  # a step makes room for 1/16 more tokens, at least 256
ALIGNMENT_BYTES = 32 * CACHE_LINE_BYTES  # of at most 32 arrays in the arena
SEED, LAM, THRESHOLD = 0, 0.9, 2.5e-4  # onebit's and bitplane's defaults


class Shape(NamedTuple):
    """Of the keys and values of one layer."""

    n_kv_heads: int
    head_dim: int
    n_rep: int


Pair = tuple[Codec, Codec]


@dataclasses.dataclass(frozen=True)
class Tier:
    """``codecs`` for a shape and a number of tokens."""

    name: str
    codecs: Callable[[Shape, int], Pair]

    def block_bytes(self, shape: Shape) -> int:
        """Bytes of WORD tokens."""
        return sum(layout_bytes(codec.layout()) for codec in self.codecs(shape, WORD))


def _dense(shape: Shape, n: int) -> Pair:
    return F16(shape.n_kv_heads, n, shape.head_dim), F16(shape.n_kv_heads, n, shape.head_dim)


def _planes(shape: Shape, n: int) -> Pair:
    keys = PlaneKeys(shape.n_kv_heads, n, shape.head_dim, lam=LAM, seed=SEED)
    return keys, PlaneValues(keys, n_rep=shape.n_rep, threshold=THRESHOLD)


def _signs(bits: int) -> Callable[[Shape, int], Pair]:
    def codecs(shape: Shape, n: int) -> Pair:
        size = shape.n_kv_heads, n, shape.head_dim
        keys = CentredPlanes(*size, bits=1, lam=LAM, seed=SEED)
        return keys, InterleavedValues(*size, bits=bits, seed=SEED)

    return codecs


TIERS = (
    Tier("dense", _dense),
    Tier("bitplane", _planes),
    Tier("onebit, 4-bit values", _signs(4)),
    Tier("onebit, 2-bit values", _signs(2)),
)


def tier_kinds() -> set[str]:
    """Of all tiers' codecs."""
    return {codec.kind for tier in TIERS for codec in tier.codecs(Shape(1, WORD, 1), WORD)}


@functools.cache
def usable_tiers(shape: Shape) -> tuple[Tier, ...]:
    """TIERS without those that are no smaller than a finer one: codes of a narrow head fill whole words."""
    usable = [TIERS[0]]
    for tier in TIERS[1:]:
        if tier.block_bytes(shape) < usable[-1].block_bytes(shape):
            usable.append(tier)
    return tuple(usable)


@dataclasses.dataclass(frozen=True)
class Split:
    """Older tokens, ``coarse``, in tier ``level`` + 1 of `usable_tiers`; ``fine`` later ones in tier ``level``."""

    level: int
    coarse: int
    fine: int

    @property
    def capacity(self) -> int:
        return self.coarse + self.fine


def choose_split(shape: Shape, n_tokens: int, most_tokens: int, n_bytes: int) -> Split | None:
    """The finest that holds n_tokens in n_bytes, with room for more of them (up to most_tokens) if there is.

    All are multiples of WORD tokens. None: they don't fit even in the coarsest tier.
    """
    room = n_bytes - ALIGNMENT_BYTES
    blocks = n_tokens // WORD
    sizes = [tier.block_bytes(shape) for tier in usable_tiers(shape)]
    for level, (fine, coarse) in enumerate(itertools.pairwise(sizes)):
        too_much = blocks * fine - room
        n_coarse = max(0, -(-too_much // (fine - coarse)))
        if n_coarse <= blocks:
            n_fine = min((room - n_coarse * coarse) // fine, most_tokens // WORD - n_coarse)
            return Split(level, n_coarse * WORD, max(0, n_fine) * WORD)
    return None


def least_bytes(shape: Shape, n_tokens: int) -> int:
    """What the coarsest tier needs for them."""
    return n_tokens // WORD * usable_tiers(shape)[-1].block_bytes(shape) + ALIGNMENT_BYTES


class Store(NamedTuple):
    """The tokens first..first + capacity in one tier."""

    tier: Tier
    keys: Codec
    values: Codec
    first: int
    capacity: int

    @property
    def block_bytes(self) -> int:
        return sum(layout_bytes(codec.layout()) for codec in (self.keys, self.values)) * WORD // self.capacity


class Tiers:
    """The two stores, coarse and fine, and the steps so far: (tokens held, tier that began)."""

    workspace: Workspace

    def __init__(self, shape: Shape, most_tokens: int, n_bytes: int) -> None:
        self._shape, self.most_tokens = shape, most_tokens
        self.n_bytes = min(n_bytes, most_tokens // WORD * TIERS[0].block_bytes(shape) + ALIGNMENT_BYTES)
        self.log: list[tuple[int, str]] = []

    def bind(self, arena: Array, kernels: Kernels) -> None:
        self._arena, self._kernels = arena, kernels
        self.log = []
        self._use(self._split_for(0))

    @property
    def split(self) -> Split:
        return self._split

    @property
    def capacity(self) -> int:
        """Tokens that fit as things are; more make it step."""
        return self._split.capacity

    def _split_for(self, n_tokens: int) -> Split:
        split = choose_split(self._shape, n_tokens, self.most_tokens, self.n_bytes)
        if split is None:
            raise CacheError(
                f"{n_tokens} tokens do not fit {self.n_bytes} bytes of a layer; raise `kv_budget`",
                field="kv_budget",
            )
        return split

    def _use(self, split: Split) -> None:
        self._split = split
        self._stores = self._carve(split, self._arena)

    def _carve(self, split: Split, buffer: Array) -> list[Store]:
        """The stores of a split, with their arrays one behind the other in a buffer of bytes."""
        position, stores, tiers = 0, [], usable_tiers(self._shape)
        for tier, first, n in (
            (tiers[split.level + 1], 0, split.coarse),
            (tiers[split.level], split.coarse, split.fine),
        ):
            if not n:
                continue
            store = Store(tier, *tier.codecs(self._shape, n), first, n)
            for codec in (store.keys, store.values):
                arrays, position = _views(codec.layout(), buffer, position)
                codec.bind(arrays, self._kernels)
            stores.append(store)
        return stores

    def parts(self, t0: int, t1: int) -> Iterator[tuple[Store, int, int]]:
        """The stores that hold tokens t0..t1, and which of these each holds."""
        for store in self._stores:
            a, b = max(t0, store.first), min(t1, store.first + store.capacity)
            if a < b:
                yield store, a, b

    def reserve(self, n_held: int, n_tokens: int) -> None:
        """Makes room for n_tokens, of which n_held are there; the oldest may become coarser."""
        if n_tokens <= self.capacity:
            return
        wanted = n_tokens + max(LEAST_GROWTH, n_tokens // GROWTH)
        split = self._split_for(min(self.most_tokens, -(-wanted // WORD) * WORD))
        before = self.workspace.array("tiers.before", self._arena.shape, np.uint8)
        before[:] = self._arena
        old = self._carve(self._split, before)
        self._arena[:] = 0
        began = {store.tier.name for store in old}
        self._use(split)
        self.log += [(n_tokens, store.tier.name) for store in self._stores if store.tier.name not in began]
        for source in old:
            for target, a, b in self.parts(source.first, min(source.first + source.capacity, n_held)):
                transfer(source, target, a, b)

    def state(self) -> dict[str, Any]:
        return {"split": dataclasses.astuple(self._split), "log": self.log}

    def load_state(self, state: Mapping[str, Any]) -> None:
        split = Split(*map(int, state["split"]))
        if not self._fits(split):
            raise ValueError(f"{split}")
        self.log = [(int(n), str(name)) for n, name in state["log"]]
        self._use(split)

    def _fits(self, split: Split) -> bool:
        """Whether its stores are whole blocks, of two tiers that there are, in the arena."""
        tiers = usable_tiers(self._shape)
        if not 0 <= split.level < len(tiers) - 1 or min(split.coarse, split.fine) < 0:
            return False
        if split.coarse % WORD or split.fine % WORD or split.capacity > self.most_tokens:
            return False
        sizes = [tiers[split.level + i].block_bytes(self._shape) for i in (0, 1)]
        n_bytes = (split.fine * sizes[0] + split.coarse * sizes[1]) // WORD
        return n_bytes + ALIGNMENT_BYTES <= max(self.n_bytes, ALIGNMENT_BYTES)


def _views(layout: Layout, buffer: Array, position: int) -> tuple[dict[str, Array], int]:
    arrays = {}
    for name, (shape, dtype) in layout.items():
        position = -(-position // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        n_bytes = layout_bytes({name: (shape, dtype)})
        arrays[name] = buffer[position : position + n_bytes].view(dtype).reshape(shape)
        position += n_bytes
    return arrays, position


def transfer(source: Store, target: Store, t0: int, t1: int) -> None:
    """Moves tokens t0..t1 (multiples of WORD) from one store to another, of the same tier or a coarser one."""
    for a in range(t0, t1, CONVERT_TOKENS):
        b = min(a + CONVERT_TOKENS, t1)
        here, there = (a - source.first, b - source.first), a - target.first
        for old, new in ((source.keys, target.keys), (source.values, target.values)):
            if new.layout().keys() <= old.layout().keys() and _same_units(old, new):
                copy_tokens(old, new, *here, there)
            else:
                new.encode(decode(old, *here), there)


def _same_units(old: Codec, new: Codec) -> bool:
    """Whether a token takes the same place in the arrays that both have."""
    units = [{name: (spec[0][2:], spec[1]) for name, spec in codec.layout().items()} for codec in (old, new)]
    return all(units[0][name] == unit for name, unit in units[1].items())


def copy_tokens(old: Codec, new: Codec, t0: int, t1: int, to: int) -> None:
    """Arrays of all these codecs have tokens, or blocks of WORD tokens, along their second axis."""
    for name, array in new.arrays.items():
        source = old.arrays[name]
        each, other = new.capacity // array.shape[1], old.capacity // source.shape[1]
        array[:, to // each : (to + t1 - t0) // each] = source[:, t0 // other : t1 // other]


def decode(codec: Any, t0: int, t1: int) -> F32:
    """(n_kv_heads, t1 - t0, head_dim) of a codec in DECODERS; t0, t1 are multiples of WORD."""
    return contiguous(DECODERS[type(codec)](codec, t0, t1))


def _decode_planes(codec: PlaneValues, t0: int, t1: int) -> F32:
    a = codec.arrays
    planes = np.concatenate([a["top"][:, t0:t1], a["low"][:, t0:t1]], axis=2)  # (g, n, 4, words)
    bits = np.unpackbits(contiguous(planes).view(np.uint8).ravel(), bitorder="little").astype(np.float32)
    steps = np.asarray(np.array([[4], [2], [1], [0.5]], np.float32), like=bits)
    levels = ((2 * bits - 1).reshape(*planes.shape[:3], -1) * steps).sum(axis=2)
    rotated = levels * a["scale"][:, t0:t1].view(np.float16).astype(np.float32)[..., None]
    out = np.zeros_like(rotated, shape=(codec.n_kv_heads, t1 - t0, codec.head_dim))
    codec.keys.rotation.add_back(contiguous(rotated), out, codec.keys.kernels)
    return out


def _decode_interleaved(codec: InterleavedValues, t0: int, t1: int) -> F32:
    """The sum over values with a weight of 1 for one of them: exact, as weights are rounded in each block."""
    like, n_kv_heads = codec.arrays["codes"], codec.n_kv_heads
    out = np.zeros_like(like, np.float32, shape=(n_kv_heads, t1 - t0, codec.head_dim))
    one = np.asarray(np.stack([np.eye(WORD, dtype=np.float32)] * n_kv_heads), like=like)
    for a in range(t0, t1, WORD):
        part = np.zeros_like(out, shape=(n_kv_heads, WORD, codec.head_dim))
        codec.kernels.sums(codec, one, a, a + WORD, part)
        out[:, a - t0 : a - t0 + WORD] = part
    return out


DECODERS: dict[type[Codec], Callable[[Any, int, int], F32]] = {
    F16: lambda codec, t0, t1: codec.decode(t0, t1),
    PlaneValues: _decode_planes,
    InterleavedValues: _decode_interleaved,
}


class TieredKeys(Codec):
    """The keys of both stores: encodes what is packed, and owns the arena."""

    kind = "tiers"  # no kernel reads it: `Steps` has a segment for each store

    def __init__(self, tiers: Tiers, n_kv_heads: int, capacity: int, head_dim: int) -> None:
        super().__init__(n_kv_heads, capacity, head_dim)
        self.tiers = tiers

    def layout(self) -> Layout:
        return {"arena": ((self.tiers.n_bytes,), "uint8")}

    @property
    def token_bytes(self) -> int:
        """At most, keys and values."""
        parts = self.tiers.parts(0, self.tiers.capacity)
        return max((-(-store.block_bytes // WORD) for store, _, _ in parts), default=0)

    def bind(self, arrays: dict[str, Array], kernels: Kernels) -> None:
        super().bind(arrays, kernels)
        self.tiers.bind(arrays["arena"], kernels)

    def encode(self, x: F32, t0: int) -> None:
        self.tiers.reserve(t0, t0 + x.shape[1])
        for store, a, b in self.tiers.parts(t0, t0 + x.shape[1]):
            store.keys.encode(contiguous(x[:, a - t0 : b - t0]), a - store.first)


class TieredValues(Codec):
    """The values of both stores. Encoded after the keys, which have made room for them."""

    kind = "tiers"

    def __init__(self, tiers: Tiers, n_kv_heads: int, capacity: int, head_dim: int) -> None:
        super().__init__(n_kv_heads, capacity, head_dim)
        self.tiers = tiers

    def layout(self) -> Layout:
        return {}

    @property
    def token_bytes(self) -> int:
        """Counted with the keys."""
        return 0

    def encode(self, x: F32, t0: int) -> None:
        for store, a, b in self.tiers.parts(t0, t0 + x.shape[1]):
            store.values.encode(contiguous(x[:, a - t0 : b - t0]), a - store.first)


def described(log: Sequence[tuple[int, str]]) -> str:
    """The steps so far, for the report."""
    return ", ".join(f"{name} from {n} tokens on" for n, name in log)
