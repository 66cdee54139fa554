"""What `edgekv board` writes: every measurement and what surrounded it, in one JSON file, also its state."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Annotated, Any, Literal

import msgspec

from edgekv import schema
from edgekv.errors import ConfigError
from edgekv.files import atomic_write, read_object

Number = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class Machine(msgspec.Struct, frozen=True):
    """`edgekv.machine.machine_info`: ``cores`` are those that the process may use."""

    cpu: str | None
    board: str | None
    architecture: Name
    cores: Annotated[int, msgspec.Meta(ge=1)]
    ram_bytes: Count
    os: str
    versions: dict[str, str | None]

    @property
    def name(self) -> str:
        """For people: the board's, else the processor's."""
        return self.board or self.cpu or self.architecture


class Surroundings(msgspec.Struct, frozen=True):
    """cooling: fans and cooling devices that the system names. clocks: governor and range of each kind of core.
    about: the user's own words."""

    cooling: tuple[str, ...]
    clocks: tuple[str, ...]
    about: str


class Span(msgspec.Struct, frozen=True):
    """When something ran, and in what state the machine was.

    started: Unix seconds. seconds: of what was timed. took_s: filling caches and warming up included.
    temperature_c, clock_mhz: at its end; None: not known. throttling: what limited the clocks meanwhile; None:
    nothing here could say. others: the share of the cores' time that other programs took, 0 to 1.
    """

    started: Number
    seconds: Number
    took_s: Number
    temperature_c: float | None
    clock_mhz: float | None
    throttling: tuple[str, ...] | None
    others: Annotated[float, msgspec.Meta(ge=0, le=1)]


class Energy(msgspec.Struct, frozen=True):
    """Per token: all that the meter sees, what the samples leave open of it, and without what it drew at rest."""

    meter: Name
    mj_per_token: float
    error_mj: float | None
    net_mj_per_token: float | None
    average_w: float


class Idle(msgspec.Struct, frozen=True):
    """At rest, before everything: when, for how long, and what a meter that is here saw."""

    started: Number
    seconds: Number
    watts: float | None
    spread_w: float | None
    others: Annotated[float, msgspec.Meta(ge=0, le=1)]


class Bandwidth(msgspec.Struct, frozen=True, tag="bandwidth", tag_field="what"):
    """Memory read in order by so many threads together, the best of a few passes; 1e9 bytes per second."""

    threads: Annotated[int, msgspec.Meta(ge=1)]
    gb_per_s: Number
    span: Span

    @property
    def key(self) -> str:
        return bandwidth_key(self.threads)

    @property
    def text(self) -> str:
        return f"{self.gb_per_s:.1f} GB/s"


class ThreadsRow(msgspec.Struct, frozen=True, tag="threads", tag_field="what"):
    """A shape with so many threads for everything: a token in an empty f16 cache, and a short prompt."""

    shape: Name
    threads: Annotated[int, msgspec.Meta(ge=1)]
    token_ms: Positive
    prompt_tokens_per_s: Positive
    span: Span

    @property
    def key(self) -> str:
        return threads_key(self.shape, self.threads)

    @property
    def text(self) -> str:
        return f"{1e3 / self.token_ms:.2f} tokens/s, prompts {self.prompt_tokens_per_s:.1f}"


class Decode(msgspec.Struct, frozen=True, tag="decode", tag_field="what"):
    """A token of a whole model behind ``depth`` others; milliseconds are medians, or what their names say.

    matmul_ms, attention_ms: of token_ms. bytes_read: weights and cache that a token reads. peak_memory_bytes:
    resident, of the process, from the empty cache on.
    """

    shape: Name
    kv: Name
    depth: Count
    tokens: Annotated[int, msgspec.Meta(ge=1)]
    token_ms: Positive
    token_ms_best: Number
    token_ms_p95: Number
    matmul_ms: Number
    attention_ms: Number
    cache_bytes: Count
    bytes_read: Count
    peak_memory_bytes: Count
    span: Span
    energy: Energy | None = None

    @property
    def key(self) -> str:
        return decode_key(self.shape, self.kv, self.depth)

    @property
    def text(self) -> str:
        return f"{1e3 / self.token_ms:.2f} tokens/s"


class Prompt(msgspec.Struct, frozen=True, tag="prompt", tag_field="what"):
    """A prompt into an empty cache, the best of a few: its speed, and the seconds until its first token is chosen.

    runs: prompts that were read; the energy is per token of all of them.
    """

    shape: Name
    kv: Name
    tokens: Annotated[int, msgspec.Meta(ge=1)]
    runs: Annotated[int, msgspec.Meta(ge=1)]
    tokens_per_s: Positive
    first_token_s: Number
    peak_memory_bytes: Count
    span: Span
    energy: Energy | None = None

    @property
    def key(self) -> str:
        return prompt_key(self.shape, self.kv, self.tokens)

    @property
    def text(self) -> str:
        return f"{self.tokens_per_s:.1f} tokens/s, {self.first_token_s:.2f} s to the first"


Measured = Bandwidth | ThreadsRow | Decode | Prompt


class Shape(msgspec.Struct, frozen=True):
    """A model of random weights, all its layers, as it was opened here.

    threads: of attention; decode_threads, prompt_threads: of weight products, chosen at load or asked for.
    opening_s: seconds to load it; making_s: to draw its weights before that, 0 if they were there.
    """

    name: Name
    parameters: Count
    layers: Count
    weights: Name
    weights_bytes: Count
    threads: Annotated[int, msgspec.Meta(ge=1)]
    decode_threads: Annotated[int, msgspec.Meta(ge=1)]
    prompt_threads: Annotated[int, msgspec.Meta(ge=1)]
    making_s: Number
    opening_s: Number
    opening_peak_bytes: Count


class LeftOut(msgspec.Struct, frozen=True):
    """What was not measured, and why."""

    what: Name
    why: str


class Plan(msgspec.Struct, frozen=True):
    """What is to be measured. A file is continued by a command of the same plan only.

    seconds: that each decoding is timed for. threads: what was asked for; None: chosen at load.
    """

    shapes: tuple[str, ...]
    schemes: tuple[str, ...]
    depths: tuple[int, ...]
    prompt: int
    threads_prompt: int
    weights: str
    seconds: float
    idle_s: float
    threads: int | None = None


class Board(msgspec.Struct):
    """One machine's page. ``attempts`` counts the beginnings of what has no result yet."""

    format: Literal[1]  # changes when a field's meaning does
    machine: Machine
    surroundings: Surroundings
    plan: Plan
    meter: str
    idle: Idle | None = None
    shapes: list[Shape] = []
    measured: list[Measured] = []
    left_out: list[LeftOut] = []
    attempts: dict[str, int] = {}
    finished: bool = False

    def find(self, key: str) -> Measured | None:
        """The measurement of that key; None: not made yet."""
        return next((m for m in self.measured if m.key == key), None)

    @property
    def slug(self) -> str:
        """The machine's name for a file."""
        plain = "".join(c if c.isalnum() else "-" for c in self.machine.name.lower())
        return "-".join(part for part in plain.split("-") if part)[:60] or "machine"


def bandwidth_key(threads: int) -> str:
    return f"memory, {_n_threads(threads)}"


def threads_key(shape: str, threads: int) -> str:
    return f"{shape}, {_n_threads(threads)}"


def _n_threads(n: int) -> str:
    return f"{n} thread{'s' if n > 1 else ''}"


def decode_key(shape: str, kv: str, depth: int) -> str:
    return f"{shape}, {kv} at {depth}"


def prompt_key(shape: str, kv: str, tokens: int) -> str:
    return f"{shape}, {kv}, prompt of {tokens}"


def save(board: Board, path: pathlib.Path) -> None:
    """Whole or not at all. Raises CheckpointError where it can't be written."""
    text = json.dumps(msgspec.to_builtins(board), indent=1, allow_nan=False)
    atomic_write(path, (text + "\n").encode())


def load(path: str | os.PathLike[str]) -> Board:
    """A file of `save`. Raises ConfigError, with the field and its value, for anything else."""
    hint = "give a file that `edgekv board` wrote, or begin anew with `again`"
    try:
        raw = read_object(path)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; {hint}") from None
    return schema.read(raw, Board, str(path), hint)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of the file."""
    return {"title": "edgekv board", **msgspec.json.schema(Board)}
