"""steps (ours): a bound on bytes that holds: as the cache fills, the oldest tokens get by with fewer bits.

Packed tokens lie in two stores of different precision within a fixed number of bytes, the arena. As tokens arrive,
the oldest blocks of the finer store are packed more coarsely, and once all are, the next coarser of TIERS begins.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from edgekv.errors import CacheError
from edgekv.kernels import Kernels
from edgekv.kernels.arrays import CACHE_LINE_BYTES, contiguous
from edgekv.kernels.interface import CENTRE, Segment, place_of
from edgekv.kvcache.cache import Geometry, Layout, Workspace, layout_bytes
from edgekv.kvcache.codec_planes import CentredPlanes, InterleavedValues, runs_of_heads
from edgekv.kvcache.codecs import F16, WORD, Codec, f16_codecs
from edgekv.kvcache.knobs import Knobs, number, tokens
from edgekv.kvcache.planes import KEY_SCALES, PlanesKnobs
from edgekv.kvcache.windowed import SinkWindowCache, Sizes
from edgekv.machine import format_bytes
from edgekv.types import F32, Array

ALIGNMENT_BYTES = 32 * CACHE_LINE_BYTES  # of at most 32 arrays in the arena
SEED = PlanesKnobs.seed


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


def _exact(shape: Shape, n: int) -> Pair:
    return f16_codecs(shape.n_kv_heads, n, shape.head_dim)


def _planes(k_bits: int, v_bits: int) -> Callable[[Shape, int], Pair]:
    def codecs(shape: Shape, n: int) -> Pair:
        size = shape.n_kv_heads, n, shape.head_dim
        keys = CentredPlanes(*size, bits=k_bits, key_scale=KEY_SCALES[k_bits], seed=SEED)
        return keys, InterleavedValues(*size, bits=v_bits, seed=SEED)

    return codecs


TIERS = (
    Tier("f16", _exact),
    Tier("4 bits", _planes(4, 4)),
    Tier("3 bits", _planes(3, 3)),
    Tier("2 bits", _planes(2, 2)),
    Tier("2-bit keys and 1-bit values", _planes(2, 1)),
    Tier("1 bit", _planes(1, 1)),
)


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


GROWTH, LEAST_GROWTH = 16, 256  # a step makes room for 1/16 more tokens, at least 256


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
        """Takes the arena (n_bytes,), laid out for no tokens."""
        self._arena, self._kernels = arena, kernels
        self.log = []
        self._use(self._split_for(0))

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
                span, to = (a - source.first, b - source.first), a - target.first
                repack(source.keys, target.keys, *span, to)
                repack(source.values, target.values, *span, to)

    def state(self) -> dict[str, Any]:
        """The split and the steps so far, ready for JSON."""
        return {"split": dataclasses.astuple(self._split), "log": self.log}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` gave. Raises ValueError for a split that can't be."""
        split, names = Split(*map(int, state["split"])), {tier.name for tier in TIERS}
        log = [(int(n), str(name)) for n, name in state["log"]]
        if not self._fits(split) or not names.issuperset(name for _, name in log):
            raise ValueError(f"{split}, {log}")
        self.log = log
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


class TieredKeys(Codec):
    """The keys of both stores: encodes what is packed, and owns the arena."""

    kind = "tiers"  # no kernel reads it: `TieredCache` has a segment for each store

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
        """Takes the arrays of `layout`, (n_kv_heads, ...) each, and the kernels."""
        super().bind(arrays, kernels)
        self.tiers.bind(arrays["arena"], kernels)

    def encode(self, x: F32, t0: int) -> None:
        """Stores x (n_kv_heads, n, head_dim) as tokens t0.."""
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
        """Stores x (n_kv_heads, n, head_dim) as tokens t0.."""
        for store, a, b in self.tiers.parts(t0, t0 + x.shape[1]):
            store.values.encode(contiguous(x[:, a - t0 : b - t0]), a - store.first)


def described(log: Sequence[tuple[int, str]]) -> str:
    """The steps so far, for the report."""
    return ", ".join(f"{name} from {n} tokens on" for n, name in log)


CONVERT_TOKENS = 512  # decoded at a time: bounds the float32 copies
PLACES = np.array([16 * group + byte for group, byte in map(place_of, range(WORD))])
"""Of a block's tokens in its planes."""


def repack(old: Codec, new: Codec, t0: int, t1: int, to: int) -> None:
    """Tokens t0..t1 of ``old`` become tokens ``to``.. of ``new``; all are multiples of WORD.

    ``new`` is a codec of the same tier or a coarser one of TIERS.
    """
    alike = new.layout().keys() <= old.layout().keys() and _same_units(old, new)
    for a in range(t0, t1, CONVERT_TOKENS):
        b = min(a + CONVERT_TOKENS, t1)
        if alike:
            copy_tokens(old, new, a, b, to + a - t0)
        else:
            new.encode(decode(old, a, b), to + a - t0)


def _same_units(old: Codec, new: Codec) -> bool:
    """Whether a token takes the same place in the arrays that both have."""
    units = [
        {name: (shape[0], shape[2:], dtype) for name, (shape, dtype) in codec.layout().items()}
        for codec in (old, new)
    ]
    return all(units[0][name] == unit for name, unit in units[1].items())


def copy_tokens(old: Codec, new: Codec, t0: int, t1: int, to: int) -> None:
    """Arrays of all these codecs have tokens, or blocks of WORD tokens, along the second axis of `_parts`."""
    for name in new.arrays:
        for array, source in zip(_parts(new, name), _parts(old, name), strict=True):
            each, other = new.capacity // array.shape[1], old.capacity // source.shape[1]
            array[:, to // each : (to + t1 - t0) // each] = source[:, t0 // other : t1 // other]


def _parts(codec: Codec, name: str) -> list[Array]:
    """An array; one whose first axis are the bits of all heads by heads of as many bits."""
    array = codec.arrays[name]
    if isinstance(codec, (CentredPlanes, InterleavedValues)) and name in ("planes", "codes"):
        return [part for _, part in runs_of_heads(codec.bits, array)]
    return [array]


def decode(codec: Any, t0: int, t1: int) -> F32:
    """(n_kv_heads, t1 - t0, head_dim) of a codec in DECODERS; t0, t1 are multiples of WORD."""
    return contiguous(DECODERS[type(codec)](codec, t0, t1))


def _decode_centred(codec: CentredPlanes, t0: int, t1: int) -> F32:
    a, blocks, width = codec.arrays, slice(t0 // WORD, t1 // WORD), codec.width
    scale = a["scale"][:, t0:t1].view(np.float16).astype(np.float32)
    codes, step = a["centres"][:, blocks], a["centre_step"][:, blocks].view(np.float16).astype(np.float32)
    means = np.concatenate([codes & 15, codes >> 4], axis=3).astype(np.float32) - np.float32(7.5)
    means *= step[..., None]
    centres = np.repeat(means[:, :, :1] + means[:, :, 1:], CENTRE, axis=2)
    rotated = centres.reshape(codec.n_kv_heads, t1 - t0, width)
    places = np.asarray(PLACES, like=codes)
    for heads, planes in runs_of_heads(codec.bits, a["planes"]):
        n, bits = planes.shape[0], planes.shape[2]
        stored = planes[:, blocks].transpose(0, 1, 3, 5, 2, 4).reshape(n, -1, WORD, bits, width // 8)
        columns = contiguous(stored[:, :, places])
        signs = 2 * np.unpackbits(columns.ravel(), bitorder="little").astype(np.float32) - 1
        worth = np.asarray(2.0 ** np.arange(bits - 1, -1, -1, dtype=np.float32)[:, None], like=signs)
        levels = (signs.reshape(n, t1 - t0, bits, width) * worth).sum(axis=2)
        rotated[heads] += levels * scale[heads][..., None]
    out = np.zeros_like(rotated, shape=(codec.n_kv_heads, t1 - t0, codec.head_dim))
    codec.rotation.add_back(contiguous(rotated), out, codec.kernels)
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
    CentredPlanes: _decode_centred,
    InterleavedValues: _decode_interleaved,
}


@dataclasses.dataclass(frozen=True)
class TieredKnobs(Knobs):
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


class TieredCache(SinkWindowCache):
    """f16 while all fits; then the oldest tokens in `planes` of 4, 3, 2, 1.5 (2-bit keys, 1-bit values) and 1 bit.

    All layers together, and the buffer that a layer is laid out anew with, take at most ``budget`` bytes at every
    moment: each layer budget / (layers + 1). A step packs as many of the oldest blocks of 64 tokens as it must for
    1/16 more tokens. What was packed finely steps down from there, through the finer code.
    """

    name = "steps"
    paper = "ours"
    summary = "f16 as long as it fits the budget, then the oldest tokens in ever fewer bits"
    tradeoff = "precision of the oldest tokens, as little as the budget allows"
    Knobs = TieredKnobs
    budget_field = "budget"
    flush_is_static = False
    sub_schemes = (
        "planes:k_bits=4,v_bits=4",
        "planes:k_bits=3,v_bits=3",
        "planes",
        "planes:v_bits=1",
        "planes:k_bits=1,v_bits=1",
    )

    def exact_sizes(self, knobs: TieredKnobs) -> Sizes:
        return Sizes(sink=knobs.sink, residual_length=knobs.residual_length, block=WORD)

    def codecs(self, geometry: Geometry, capacity: int, knobs: TieredKnobs) -> tuple[Codec, Codec]:
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
    def codecs_used(cls, knobs: Any) -> set[type[Any]] | None:
        """Returns those of all tiers."""
        return {type(codec) for tier in TIERS for codec in tier.codecs(Shape(1, WORD, 1), WORD)}

    def allocate(self, kernels: Kernels, workspace: Workspace) -> None:
        self.tiers.workspace = workspace
        super().allocate(kernels, workspace)

    def extra_state(self) -> dict[str, Any]:
        return self.tiers.state()

    def load_extra_state(self, fitted: Mapping[str, Any]) -> None:
        self.tiers.load_state(fitted)

    def readable(self) -> bool:
        return self.n_stored <= self.tiers.capacity

    def append_prompt(self, keys: F32, values: F32) -> None:
        """Appends a prompt's keys and values (n_kv_heads, n, head_dim)."""
        self._reserve(keys.shape[1])
        super().append_prompt(keys, values)

    def attend(self, queries: F32, keys: F32, values: F32, sinks: F32 | None = None) -> F32:
        """Returns attention (n_heads, n, head_dim), as `KVCache.attend`."""
        self._reserve(keys.shape[1])
        return super().attend(queries, keys, values, sinks)

    def is_static(self) -> bool:
        """Unless a step is due."""
        return super().is_static() and self._packed_then(1) <= self.tiers.capacity

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


def exact_bytes(geometry: Geometry, knobs: TieredKnobs) -> int:
    """The first and the latest tokens of a layer, in f16."""
    recent, sink = (min(geometry.capacity, n) for n in (knobs.residual_length + WORD, knobs.sink))
    return 4 * geometry.n_kv_heads * geometry.head_dim * (sink + recent)
