"""`edgekv board`: measures memory, tokens and prompts on a machine, for one JSON file and a page of tables."""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import pathlib
import re
import shutil
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from edgekv.checks import Count, Natural, read_fields
from edgekv.engine.decoder import Decoder
from edgekv.engine.loading import SessionPlan, find_device
from edgekv.errors import ConfigError, EdgeKVError, PowerError
from edgekv.eval.bench import (
    PREFILL_RUNS,
    Prefill,
    SchemeTimer,
    bench_prefill,
    shape_config,
    shape_model,
    unread_model,
)
from edgekv.files import atomic_write, read_object
from edgekv.kernels.cpu import stream
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.choice import default_scheme
from edgekv.machine import (
    available_memory_bytes,
    blas_threads,
    format_bytes,
    machine_info,
    peak_rss_bytes,
    require_memory,
    reset_peak_rss,
)
from edgekv.power import meters
from edgekv.power.energy import Idle, PhaseEnergy, PowerSource, Window
from edgekv.types import TaskProgress
from edgekv.weights.cpu import candidates

PASSES = 8  # over memory, for each number of threads
MIN_TOKENS, MAX_TOKENS = 6, 64  # that a decoding is timed for
WARM_UP_PROMPT = 16
NO_TIME = "no time was left"
NA = "n/a"
Positive = Annotated[float, msgspec.Meta(gt=0)]

# The record: one JSON file with every measurement and its conditions


class Period(msgspec.Struct, frozen=True):
    """When a measurement began (Unix seconds), how long it took, and the state of the machine.

    temperature_c, clock_mhz: at its end; None: not known. throttling: what limited the clocks meanwhile; None:
    nothing here reports it.
    """

    started: float
    seconds: float
    temperature_c: float | None = None
    clock_mhz: float | None = None
    throttling: tuple[str, ...] | None = None


class Bandwidth(msgspec.Struct, frozen=True, tag="bandwidth", tag_field="what"):
    """Speed of memory, 1e9 bytes per second, read in order by several threads: the best of a few passes."""

    threads: Count
    gb_per_s: float
    span: Period


class Decode(msgspec.Struct, frozen=True, tag="decode", tag_field="what"):
    """Time of a model's token behind ``depth`` others: medians, in milliseconds, unless the name says otherwise.

    matmul_ms, attention_ms: parts of token_ms. bytes_read: weights and cache that a token reads.
    peak_memory_bytes: resident, of the process, from the empty cache on. threads: of weight products.
    """

    shape: str
    kv: str
    depth: Natural
    tokens: Count
    token_ms: Positive
    token_ms_p95: float
    matmul_ms: float
    attention_ms: float
    cache_bytes: Natural
    bytes_read: Natural
    peak_memory_bytes: Natural
    span: Period
    threads: Count | None = None
    energy: PhaseEnergy | None = None


class Prompt(msgspec.Struct, frozen=True, tag="prompt", tag_field="what"):
    """Speed of a prompt into an empty cache, the best of ``runs``; the energy is per token of all runs."""

    shape: str
    kv: str
    tokens: Count
    runs: Count
    tokens_per_s: Positive
    peak_memory_bytes: Natural
    span: Period
    threads: Count | None = None
    energy: PhaseEnergy | None = None


Row = Bandwidth | Decode | Prompt
Task = tuple[Any, ...]  # a kind of row, then the values of its first fields, which say what is measured
KEY_FIELDS = {Bandwidth: 1, Decode: 3, Prompt: 3}  # the number of these fields


def task_of(row: Row) -> Task:
    """Returns the task that a row is the result of."""
    return (type(row), *msgspec.structs.astuple(row)[: KEY_FIELDS[type(row)]])


def task_name(task: Task) -> str:
    """Returns a task's name for a terminal."""
    return " ".join((task[0].__name__.lower(), *map(str, task[1:])))


class Skipped(msgspec.Struct, frozen=True):
    """A task that was not measured, and the reason."""

    what: str
    why: str


class Environment(msgspec.Struct, frozen=True):
    """Governors and clock ranges of the cores, and the owner's words."""

    clocks: tuple[str, ...]
    about: str


class Extent(msgspec.Struct, frozen=True):
    """What is measured. Only a command with the same plan continues a file.

    seconds: how long each decoding is timed. threads: of weight products; None: chosen at load.
    """

    shapes: tuple[str, ...]
    schemes: tuple[str, ...]
    depths: tuple[int, ...]
    prompt: int
    weights: str
    seconds: float
    idle_s: float
    threads: int | None = None

    def tasks(self, cores: int) -> list[Task]:
        """Lists the tasks: memory, then shape by shape, the most telling first."""
        tasks: list[Task] = [(Bandwidth, n) for n in sorted({1, min(2, cores), *candidates(cores)})]
        first, shallow = self.schemes[0], self.depths[0]
        for shape in self.shapes:
            tasks += [(Decode, shape, first, shallow), (Prompt, shape, first, self.prompt)]
            tasks += [(Decode, shape, kv, depth) for depth in self.depths[1:] for kv in self.schemes]
            tasks += [(Decode, shape, kv, shallow) for kv in self.schemes[1:]]
        return tasks


FULL = Extent(
    shapes=("qwen3-0.6b", "llama3.2-1b", "qwen3-1.7b", "llama3.2-3b", "qwen3-4b", "llama3.1-8b"),
    schemes=("dense", default_scheme(), "onebit", "planes", "kivi2", "h1b"),
    depths=(0, 2048, 8192),
    prompt=512,
    weights="int4",
    seconds=3.0,
    idle_s=5.0,
)
QUICK = Extent(("tiny",), ("dense", "onebit"), (0, 256), 64, "int4", 0.05, 0.1)  # a smoke test


class Board(msgspec.Struct):
    """The record of a machine. machine: as of `edgekv.machine.machine_info`. idle_w: watts at rest, before all."""

    format: Literal[1]  # changes when a field's meaning does
    machine: dict[str, Any]
    environment: Environment
    plan: Extent
    meter: str
    idle: Period | None = None
    idle_w: float | None = None
    measured: list[Row] = []
    left_out: list[Skipped] = []

    @classmethod
    def new(cls, plan: Extent, about: str, meter: str) -> Board:
        """Returns a record of this machine without measurements."""
        environment = Environment(tuple(meters.clock_ranges()), about)
        return cls(1, machine_info(), environment, plan, meter)

    @property
    def name(self) -> str:
        """Returns the board's name, else the processor's."""
        return str(self.machine["board"] or self.machine["cpu"] or self.machine["architecture"])

    @property
    def slug(self) -> str:
        """Returns the machine's name for a file."""
        return re.sub("[^a-z0-9]+", "-", self.name.lower()).strip("-")[:60] or "machine"

    def rows(self, kind: type) -> list[Any]:
        """Lists the rows of a kind; decodings by shape and depth, others as they were measured."""
        rows, shapes = [row for row in self.measured if isinstance(row, kind)], self.plan.shapes
        return sorted(rows, key=lambda row: kind is Decode and (shapes.index(row.shape), row.depth))

    def save(self, path: pathlib.Path) -> None:
        """Writes the file, whole or not at all. Raises CheckpointError where it can't be written."""
        text = json.dumps(msgspec.to_builtins(self), indent=1, allow_nan=False)
        atomic_write(path, (text + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Board:
        """Reads a file of `save`. Raises ConfigError, with the field and its value, for any other."""
        hint = "give a file that `edgekv board` wrote, or begin anew (--again)"
        try:
            return read_fields(read_object(path), cls, str(path), hint)
        except ValueError as error:
            raise ConfigError(f"{path}: {error}; {hint}") from None


# Measuring


class Run:
    """A run of `edgekv board`: measures what ``board`` lacks, and writes it to ``path`` after every measurement.

    seconds: after which no measurement begins. say: is called with a line about every measurement.
    """

    def __init__(
        self,
        board: Board,
        path: pathlib.Path,
        source: PowerSource,
        seconds: float,
        say: Callable[[str], None],
        progress: TaskProgress,
    ) -> None:
        self.board, self.path, self.source = board, path, source
        self._say, self._progress = say, progress
        self._deadline = time.perf_counter() + seconds
        self._opened, self._weights_bytes = "", 0  # the open shape
        self._window: Window | None = None  # what the meter saw of the latest measurement
        self.decoder: Decoder

    def go(self) -> None:
        """Measures all that there is time for. A task that raises an EdgeKVError is left out with its reason."""
        board = self.board
        board.left_out = []
        self.source.start()
        try:
            if board.idle is None:
                board.idle = self._span(lambda: time.sleep(board.plan.idle_s))
                board.idle_w = self._window.average_w if self._window else None
            done = set(map(task_of, board.measured))
            for task in board.plan.tasks(board.machine["cores"]):
                if task not in done:
                    self._measure(task)
            self._close()
        finally:
            self.source.stop()
            board.save(self.path)

    def _measure(self, task: Task) -> None:
        measures: dict[Any, Callable[..., Row]] = {
            Bandwidth: self.bandwidth,
            Decode: self.decode,
            Prompt: self.prompt,
        }
        try:
            if time.perf_counter() > self._deadline:
                raise EdgeKVError(NO_TIME)
            row = measures[task[0]](*task[1:])
        except (EdgeKVError, MemoryError) as error:
            self.board.left_out.append(Skipped(task_name(task), str(error) or "out of memory"))
        else:
            if self._window and not isinstance(row, Bandwidth):
                n_tokens = row.tokens * row.runs if isinstance(row, Prompt) else row.tokens
                idle = None if self.board.idle_w is None else Idle(self.board.idle_w, self.board.plan.idle_s)
                row = msgspec.structs.replace(row, energy=PhaseEnergy.of(self._window, n_tokens, idle))
            self.board.measured.append(row)
            self.board.save(self.path)
            head, cell = next(iter(COLUMNS[task[0]].items()))
            self._say(f"{task_name(task)}: {cell(row)} {head}")

    def _span(self, work: Callable[[], Any]) -> Period:
        """Does the work between two readings of the meter; returns when it ran and the state of the machine."""
        source, self._window = self.source, None
        limits = meters.join_limits(meters.read_throttle(), source.read_throttle())
        source.mark()
        started, begun = time.time(), time.perf_counter()
        work()
        ended = time.perf_counter()
        source.mark()
        with contextlib.suppress(PowerError):
            self._window = source.window(begun, ended)
        now = meters.Conditions.now()
        throttling = meters.limits_between(limits, meters.join_limits(now.throttle, source.read_throttle()))
        return Period(started, ended - begun, now.temperature_c, now.clock_mhz, throttling)

    def _open(self, shape: str, kv: str, n: int) -> None:
        """Opens a shape with random weights, and closes the one that was open.

        Raises MemoryBudgetError where the shape with a cache of n tokens does not fit.
        """
        plan = self.board.plan
        positions = max(*plan.depths, plan.prompt) + MAX_TOKENS + 1
        unread = unread_model(shape, shape_config(shape, None, positions))
        planned = SessionPlan.make(unread, kv=kv, ctx=n + MAX_TOKENS + 1, weights=plan.weights)
        # The open shape's memory counts as available: it is this shape, or is closed before this one is opened.
        require_memory(planned.parts(), available_memory_bytes() + self._weights_bytes)
        if self._opened != shape:
            self._close()
            model = shape_model(shape, None, positions, plan.weights, self._progress)
            form = model.weight_format(plan.weights)
            self.decoder = find_device("cpu").decoder(model, form, positions, plan.threads, self._progress)
            self._opened, self._folder, self._weights_bytes = shape, model.path, planned.weights_bytes
        gc.collect()  # caches of earlier measurements refer to themselves
        reset_peak_rss()

    def _close(self) -> None:
        """Closes the open shape, and deletes its weights on disk where there was time for all of it."""
        if self._opened:
            self._opened, self._weights_bytes = "", 0
            del self.decoder
            if time.perf_counter() < self._deadline:
                shutil.rmtree(self._folder, ignore_errors=True)

    def bandwidth(self, n_threads: int) -> Bandwidth:
        """Measures the speed of memory that is read in order."""
        probe = stream.Bandwidth(n_threads)

        def work() -> None:
            for _ in range(PASSES):
                probe.sample()

        span = self._span(work)
        return Bandwidth(n_threads, probe.best / 1e9, span)

    def decode(self, shape: str, kv: str, depth: int) -> Decode:
        """Times a token behind ``depth`` synthetic ones."""
        self._open(shape, kv, depth)
        timer = SchemeTimer(self.decoder, CacheSpec.parse(kv), depth, MAX_TOKENS + 1)

        def work() -> None:
            deadline = time.perf_counter() + self.board.plan.seconds
            while len(timer.totals) < MIN_TOKENS or time.perf_counter() < deadline:
                timer.decode(1)
                if len(timer.totals) == MAX_TOKENS:
                    break

        with blas_threads(1):
            span = self._span(work)
        timing = timer.timing()
        return Decode(
            shape=shape,
            kv=kv,
            depth=depth,
            tokens=timing.tokens,
            token_ms=timing.token_ms,
            token_ms_p95=timing.token_ms_p95,
            matmul_ms=timing.matmul_ms,
            attention_ms=timer.part_ms("attention"),
            cache_bytes=timing.cache_bytes,
            bytes_read=self.decoder.weights.token_bytes + sum(cache.bytes_read() for cache in timer.caches),
            peak_memory_bytes=peak_rss_bytes(),
            span=span,
            threads=self._threads(is_prompt=False),
        )

    def prompt(self, shape: str, kv: str, n: int) -> Prompt:
        """Times a prompt of n random tokens."""
        self._open(shape, kv, n)
        spec, runs = [CacheSpec.parse(kv)], list[Prefill]()
        bench_prefill(self.decoder, spec, [WARM_UP_PROMPT])
        span = self._span(lambda: runs.extend(bench_prefill(self.decoder, spec, [n])))
        speed, threads = runs[0].tokens_per_s, self._threads(is_prompt=True)
        return Prompt(shape, kv, n, PREFILL_RUNS, speed, peak_rss_bytes(), span, threads)

    def _threads(self, is_prompt: bool) -> int:
        chosen = self.decoder.ops.threads
        return self.decoder.threads if chosen is None else chosen.prompt if is_prompt else chosen.decode


# The page


COMMON: dict[str, Callable[[Any], str]] = {
    "peak memory": lambda row: format_bytes(row.peak_memory_bytes),
    "energy": lambda row: row.energy.to_text() if row.energy else NA,
}
COLUMNS: dict[Any, dict[str, Callable[[Any], str]]] = {
    Bandwidth: {"GB/s": lambda row: f"{row.gb_per_s:.1f}"},
    Decode: {
        "tokens/s": lambda row: f"{1e3 / row.token_ms:.2f}",
        "ms, 95th percentile": lambda row: f"{row.token_ms:.1f}, {row.token_ms_p95:.1f}",
        "weights + attention": lambda row: f"{row.matmul_ms:.1f} + {row.attention_ms:.1f}",
        "GB/s": lambda row: f"{row.bytes_read / row.token_ms / 1e6:.1f}",
        **COMMON,
    },
    Prompt: {"tokens/s": lambda row: f"{row.tokens_per_s:.1f}", **COMMON},
}
TITLES = {
    Bandwidth: "Memory, read in order",
    Decode: "Decoding: random weights in the model's shape, synthetic keys and values up to the depth, medians",
    Prompt: "Prompts: the best of a few",
}


def page(board: Board) -> str:
    """Writes a board's page of Markdown, from its record alone."""
    started = min((row.span.started for row in board.measured), default=0.0)
    day = datetime.datetime.fromtimestamp(started, datetime.timezone.utc)
    parts = [
        f"# {board.name}\n",
        f"edgekv {board.machine['versions'].get('edgekv')}, {day:%Y-%m-%d}. Written by `edgekv board`, which "
        "[README.md](README.md) explains; the figures with all that belongs to them are in the JSON file beside "
        "this page.\n",
    ]
    if board.plan.shapes == ("tiny",):
        parts.append("A smoke test on a tiny model: its figures say nothing about the machine.\n")
    parts.append(_table(["", ""], _facts(board)))
    for kind, title in TITLES.items():
        head = [*kind.__struct_fields__[: KEY_FIELDS[kind]], *COLUMNS[kind]]
        rows = [
            [*map(str, task_of(row)[1:]), *(cell(row) for cell in COLUMNS[kind].values())]
            for row in board.rows(kind)
        ]
        parts += [f"## {title}\n", _table(head, rows)] if rows else []
    if board.left_out:
        parts += ["## Left out\n", *(f"- {skipped.what}: {skipped.why}" for skipped in board.left_out), ""]
    return "\n".join(parts)


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)) + "\n"


def throttling(board: Board) -> str:
    """Names what limited the clocks at any time."""
    known = [row.span.throttling for row in board.measured if row.span.throttling is not None]
    if not known:
        return "not known (nothing here reports it)"
    return ", ".join(sorted({limit for limits in known for limit in limits})) or "none"


def _facts(board: Board) -> list[list[str]]:
    m, environment = board.machine, board.environment
    degrees = [row.span.temperature_c for row in board.measured if row.span.temperature_c is not None]
    clocks = [row.span.clock_mhz for row in board.measured if row.span.clock_mhz is not None]
    return [
        ["processor", f"{m['cpu'] or 'not named'}, {m['architecture']}, {m['cores']} cores"],
        ["memory", format_bytes(m["ram_bytes"])],
        ["system", m["os"]],
        ["versions", ", ".join(f"{name} {version}" for name, version in m["versions"].items())],
        ["as its owner says", environment.about or "nothing was said"],
        ["clocks", "; ".join(environment.clocks) or "not named by the system"],
        ["clock at the ends of measurements", f"{min(clocks):.0f} to {max(clocks):.0f} MHz" if clocks else NA],
        ["warmest", f"{max(degrees):.1f} C" if degrees else NA],
        ["throttling", throttling(board)],
        ["weights", board.plan.weights],
        ["threads of weight products", f"{board.plan.threads or 'chosen at load'}"],
        ["power meter", board.meter],
        ["at rest", NA if board.idle_w is None else f"{board.idle_w:.2f} W"],
    ]
