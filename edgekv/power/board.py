"""`edgekv board`: its record, its measurements, and the run that fills a record and continues one."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import psutil

from edgekv.checks import read_fields
from edgekv.engine.decoder import Decoder
from edgekv.engine.loading import find_device, open_caches
from edgekv.engine.options import SessionPlan
from edgekv.engine.sampling import Sampler, SamplingParams
from edgekv.errors import ConfigError, EdgeKVError, PowerError
from edgekv.eval.bench import SchemeTimer, shape_config, shape_model, unread_model
from edgekv.files import atomic_write, read_object
from edgekv.kernels.cpu import stream
from edgekv.kvcache import CacheSpec
from edgekv.machine import (
    all_cores,
    available_memory_bytes,
    blas_threads,
    format_bytes,
    machine_info,
    peak_rss_bytes,
    reset_peak_rss,
)
from edgekv.models import architecture
from edgekv.power import conditions
from edgekv.power.energy import PowerSource, Window
from edgekv.power.meters import Root, Throttle, all_limits, find_meter
from edgekv.power.sampler import CsvLog, PowerSampler, Unmetered
from edgekv.types import TaskProgress
from edgekv.weights.formats import weight_format
from edgekv.weights.random import random_folder
from edgekv.weights.store import is_store
from edgekv.weights.threads import candidates

PASSES = 8  # over memory, for each number of threads
LEAST_TOKENS, MOST_TOKENS = 6, 64  # of a decoding that is timed
MOST_PROMPTS = 3
WARM_UP_PROMPT = 16
EVERY_NUMBER = 4  # up to so many cores the bandwidth of each number of threads is measured
NO_TIME = "no time was left"

# The record: one JSON file with every measurement and what surrounded it

Number = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class Machine(msgspec.Struct, frozen=True):
    """`edgekv.machine.machine_info`: ``cores`` are those that the process may use."""

    cpu: str | None
    board: str | None
    architecture: Name
    cores: AtLeastOne
    ram_bytes: Count
    os: str
    versions: dict[str, str | None]

    @property
    def name(self) -> str:
        """The board's name, else the processor's."""
        return self.board or self.cpu or self.architecture


class Environment(msgspec.Struct, frozen=True):
    """cooling: fans and cooling devices that the system names. clocks: governor and range of each kind of core.
    about: the user's own words."""

    cooling: tuple[str, ...]
    clocks: tuple[str, ...]
    about: str


class Span(msgspec.Struct, frozen=True):
    """When something ran, and in what state the machine was.

    started: Unix seconds. seconds: of what was timed. took_s: filling caches and warming up included.
    temperature_c, clock_mhz: at its end; None: not known. throttling: what limited the clocks meanwhile; None:
    nothing here could say. others: the share of the cores' time that other programs took.
    """

    started: Number
    seconds: Number
    took_s: Number
    temperature_c: float | None
    clock_mhz: float | None
    throttling: tuple[str, ...] | None
    others: Share


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
    others: Share


class Bandwidth(msgspec.Struct, frozen=True, tag="bandwidth", tag_field="what"):
    """Memory read in order by so many threads together, the best of a few passes; 1e9 bytes per second."""

    threads: AtLeastOne
    gb_per_s: Number
    span: Span

    @property
    def key(self) -> str:
        return threads_key("memory", self.threads)

    @property
    def text(self) -> str:
        return f"{self.gb_per_s:.1f} GB/s"


class ThreadsRow(msgspec.Struct, frozen=True, tag="threads", tag_field="what"):
    """A shape with so many threads for everything: a token in an empty f16 cache, and a short prompt."""

    shape: Name
    threads: AtLeastOne
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
    tokens: AtLeastOne
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
    tokens: AtLeastOne
    runs: AtLeastOne
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


def threads_key(what: str, n: int) -> str:
    return f"{what}, {n} thread{'s' if n > 1 else ''}"


def decode_key(shape: str, kv: str, depth: int) -> str:
    return f"{shape}, {kv} at {depth}"


def prompt_key(shape: str, kv: str, tokens: int) -> str:
    return f"{shape}, {kv}, prompt of {tokens}"


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
    threads: AtLeastOne
    decode_threads: AtLeastOne
    prompt_threads: AtLeastOne
    making_s: Number
    opening_s: Number
    opening_peak_bytes: Count


class Skipped(msgspec.Struct, frozen=True):
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

    @property
    def capacity(self) -> int:
        """Tokens that a decoder must be able to read."""
        return max(*self.depths, self.prompt) + MOST_TOKENS + 1


class Board(msgspec.Struct):
    """One machine's record."""

    format: Literal[1]  # changes when a field's meaning does
    machine: Machine
    surroundings: Environment
    plan: Plan
    meter: str
    idle: Idle | None = None
    shapes: list[Shape] = []
    measured: list[Measured] = []
    left_out: list[Skipped] = []
    finished: bool = False

    @classmethod
    def new(cls, plan: Plan, about: str, meter: str, root: Root = "/") -> Board:
        """Make the record of this machine, without measurements."""
        machine = msgspec.convert(machine_info(), Machine)
        around = Environment(tuple(conditions.cooling(root)), tuple(conditions.clock_ranges(root)), about)
        return cls(1, machine, around, plan, meter)

    def find(self, key: str) -> Measured | None:
        """Return the measurement of that key; None: not made yet."""
        return next((m for m in self.measured if m.key == key), None)

    @property
    def slug(self) -> str:
        """The machine's name for a file."""
        plain = "".join(c if c.isalnum() else "-" for c in self.machine.name.lower())
        return "-".join(part for part in plain.split("-") if part)[:60] or "machine"

    def save(self, path: pathlib.Path) -> None:
        """Write it whole or not at all. Raises CheckpointError where it can't be written."""
        text = json.dumps(msgspec.to_builtins(self), indent=1, allow_nan=False)
        atomic_write(path, (text + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Board:
        """Read a file of `save`. Raises ConfigError, with the field and its value, for anything else."""
        hint = "give a file that `edgekv board` wrote, or begin anew with `again`"
        try:
            raw = read_object(path)
        except ValueError as error:
            raise ConfigError(f"{path}: {error}; {hint}") from None
        return read_fields(raw, cls, str(path), hint)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the file."""
    return {"title": "edgekv board", **msgspec.json.schema(Board)}


# What goes on around a measurement


class Watch:
    """Notes the state of the machine around a measurement, from its making to `span`."""

    def __init__(self, meter_throttle: Callable[[], Throttle | None] = lambda: None) -> None:
        self._meter_throttle = meter_throttle
        self._begun, self._before, self._busy = time.perf_counter(), self._throttle(), _busy_s()
        self.start()

    def start(self) -> None:
        """Begin what is timed."""
        self.started, self.begun = time.time(), time.perf_counter()
        self.ended: float | None = None

    def stop(self) -> None:
        """End what is timed."""
        self.ended = time.perf_counter()

    def span(self) -> Span:
        """Describe all of it, up to now."""
        ended, now = self.ended or time.perf_counter(), conditions.Conditions.now()
        return Span(
            started=self.started,
            seconds=ended - self.begun,
            took_s=time.perf_counter() - self._begun,
            temperature_c=now.temperature_c,
            clock_mhz=now.clock_mhz,
            throttling=conditions.throttled_between(self._before, self._throttle()),
            others=self.others(),
        )

    def others(self) -> float:
        """Return the share of the cores' time that other programs have taken so far."""
        busy, own = (after - start for after, start in zip(_busy_s(), self._busy, strict=True))
        cores, seconds = max(psutil.cpu_count() or 1, all_cores()), time.perf_counter() - self._begun
        return min(1.0, max(0.0, (busy - own) / (cores * seconds))) if seconds > 0 else 0.0

    def _throttle(self) -> Throttle | None:
        return all_limits(conditions.throttle(), self._meter_throttle())


def _busy_s() -> tuple[float, float]:
    """Return the seconds that all cores have worked, and that this process and its children have."""
    times, own = psutil.cpu_times(), psutil.Process().cpu_times()
    # Linux counts a guest's time as user time too.
    busy = sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)
    return busy - getattr(times, "guest_nice", 0.0), sum(own[:4])


class Metering:
    """The meter at hand, read from `start` to `stop`; without one everything is None, and ``text`` says why."""

    def __init__(self, name: str = "auto") -> None:
        """Raises PowerError for a meter that is named and can't be read."""
        self.source: PowerSource
        try:
            meter, notes = find_meter(name, device="cpu")
        except PowerError as error:
            if name != "auto":
                raise
            self.source, self.text = Unmetered(str(error)), f"none: {error}"
        else:
            self.source, self.text = PowerSampler(meter, notes=notes), f"{meter.name}: {meter.covers}"

    def rest(self, seconds: float) -> Idle:
        """Wait to see what the machine draws, and does, at rest."""
        with self.timed(Watch()) as watch:
            time.sleep(seconds)
        window = _window(self.source, watch.begun, watch.ended)
        watts, spread = (window.average_w, window.spread_w) if window else (None, None)
        return Idle(watch.started, watch.span().seconds, watts, spread, watch.others())

    @contextlib.contextmanager
    def timed(self, watch: Watch) -> Iterator[Watch]:
        """Time what runs inside, the meter read at both ends."""
        self.source.mark()
        watch.start()
        yield watch
        watch.stop()
        self.source.mark()

    def per_token(self, watch: Watch, tokens: int, idle: Idle | None) -> Energy | None:
        """Return the energy of so many tokens that were timed; None: not measured."""
        window, name = _window(self.source, watch.begun, watch.ended), self.source.about().meter
        return _energy(name, window, tokens, idle.watts if idle else None) if window and name else None


def add_log(board: Board, path: str | os.PathLike[str]) -> None:
    """Put the energies of an external meter's log into every measurement that it covers, by the system's clock.

    Raises PowerError where it can't be used, or covers none of them.
    """
    log = CsvLog(path, wall_clock=time.time, clock=time.time)  # its times as they are: Unix seconds
    idle_w = None
    if board.idle and (rest := _window(log, board.idle.started, board.idle.started + board.idle.seconds)):
        idle_w = rest.average_w
        board.idle = msgspec.structs.replace(board.idle, watts=idle_w, spread_w=rest.spread_w)
    n_found = 0
    for i, m in enumerate(board.measured):
        seen = _window(log, m.span.started, m.span.started + m.span.seconds)
        if isinstance(m, Decode | Prompt) and seen:
            tokens = m.tokens * m.runs if isinstance(m, Prompt) else m.tokens
            board.measured[i] = msgspec.structs.replace(m, energy=_energy("csv", seen, tokens, idle_w))
            n_found += 1
    if not n_found:
        raise PowerError(
            f"{os.fspath(path)}: covers none of the measurements; the meter's clock and this machine's must agree"
        )
    board.meter = f"csv: {log.about().covers}"


def _window(source: PowerSource, begun: float, ended: float | None) -> Window | None:
    with contextlib.suppress(PowerError):
        return source.window(begun, ended or begun)
    return None


def _energy(meter: str, window: Window, tokens: int, idle_w: float | None) -> Energy:
    net = None if idle_w is None else window.joules - idle_w * window.seconds
    return Energy(
        meter=meter,
        mj_per_token=1e3 * window.joules / tokens,
        error_mj=None if window.error_j is None else 1e3 * window.error_j / tokens,
        net_mj_per_token=None if net is None else 1e3 * net / tokens,
        average_w=window.average_w,
    )


# The measurements

FULL = Plan(
    shapes=("qwen3-0.6b", "llama3.2-1b", "qwen3-1.7b", "llama3.2-3b", "qwen3-4b", "llama3.1-8b"),
    schemes=("dense", "onebit", "planes", "kivi2", "h1b"),
    depths=(0, 2048, 8192),
    prompt=512,
    threads_prompt=128,
    weights="int4",
    seconds=3.0,
    idle_s=5.0,
)
QUICK = Plan(  # a smoke: that everything runs, on a model so small that its figures say nothing
    shapes=("tiny",),
    schemes=("dense", "onebit"),
    depths=(0, 256),
    prompt=64,
    threads_prompt=32,
    weights="int4",
    seconds=0.05,
    idle_s=0.1,
)


@dataclasses.dataclass(frozen=True)
class Step:
    """One measurement. ``shape`` is opened for it, on ``threads``; it fills a cache of ``kv`` up to ``depth``."""

    key: str
    measure: Callable[[Run], Measured]
    shape: str
    threads: int | None = None
    kv: str = "dense"
    depth: int = 0


def steps(plan: Plan, cores: int) -> Iterator[Step]:
    """List the measurements shape by shape, the most telling first; the first one also by numbers of threads."""
    for n in candidates(cores):
        yield Step(threads_key(plan.shapes[0], n), lambda run: run.threads_row(), plan.shapes[0], n)
    first, *others = plan.schemes
    shallow, *deeper = plan.depths
    for shape in plan.shapes:
        yield _decode_step(plan, shape, first, shallow)
        key = prompt_key(shape, first, plan.prompt)
        yield Step(key, lambda run: run.prompt(), shape, plan.threads, first, plan.prompt)
        for depth, schemes in (*((depth, plan.schemes) for depth in deeper), (shallow, others)):
            for kv in schemes:
                yield _decode_step(plan, shape, kv, depth)


def _decode_step(plan: Plan, shape: str, kv: str, depth: int) -> Step:
    return Step(decode_key(shape, kv, depth), lambda run: run.decode(kv, depth), shape, plan.threads, kv, depth)


def bandwidth_threads(cores: int) -> list[int]:
    """Numbers of threads that the bandwidth of memory is measured with."""
    return list(range(1, cores + 1)) if cores <= EVERY_NUMBER else sorted({1, 2, *candidates(cores)})


def bandwidth(n_threads: int) -> Bandwidth:
    """Measure memory's bandwidth by so many threads."""
    watch = Watch()
    probe = stream.Bandwidth(n_threads)
    watch.start()
    for _ in range(PASSES):
        probe.sample()
    return Bandwidth(n_threads, probe.best / 1e9, watch.span())


def weights_bytes(shape: str, plan: Plan) -> int:
    """Bytes of a shape's weights; it need not be made."""
    model = unread_model(shape, shape_config(shape, None, plan.capacity))
    return model.weights_bytes(weight_format(plan.weights, model.arch))


def weights_folder(shape: str, plan: Plan) -> pathlib.Path:
    """Where a shape's weights are in the cache folder, or would be."""
    config = shape_config(shape, None, plan.capacity)
    return random_folder(config, weight_format(plan.weights, architecture(config)))


class Run:
    """One run of `edgekv board`; ``board`` is written to ``path`` after every measurement.

    seconds: nothing begins after them. say: is told of every measurement, in a line.
    """

    def __init__(
        self,
        board: Board,
        path: pathlib.Path,
        metering: Metering,
        seconds: float,
        say: Callable[[str], None],
        progress: TaskProgress,
    ) -> None:
        self.board, self.path, self.metering = board, path, metering
        self._say, self._progress = say, progress
        self._deadline = time.perf_counter() + seconds
        self._opened: tuple[str, int | None] | None = None
        self.decoder: Decoder

    def go(self) -> None:
        """Measure all that there is time for. What raises an EdgeKVError is left out with its reason."""
        board = self.board
        board.left_out, board.finished = [], False
        self.metering.source.start()
        try:
            if board.idle is None:
                board.idle = self.metering.rest(board.plan.idle_s)
            for n in bandwidth_threads(board.machine.cores):
                if board.find(threads_key("memory", n)) is None:
                    self._keep(bandwidth(n))
            for step in steps(board.plan, board.machine.cores):
                if board.find(step.key) is None:
                    self._try(step)
            self._close()
            board.finished = all(skipped.why != NO_TIME for skipped in board.left_out)
        finally:
            self.metering.source.stop()
            board.save(self.path)

    def _try(self, step: Step) -> None:
        why = self._obstacle(step)
        if why is None:
            try:
                self._open(step)
                self._keep(step.measure(self))
            except (EdgeKVError, MemoryError) as error:
                why = str(error) or "out of memory"
        if why is not None:
            self.board.left_out.append(Skipped(step.key, why))

    def _keep(self, result: Measured) -> None:
        self.board.measured.append(result)
        self.board.save(self.path)
        self._say(f"{result.key}: {result.text}")

    def _obstacle(self, step: Step) -> str | None:
        """Say why the measurement can't be made now; None: nothing is in its way."""
        plan = self.board.plan
        model = unread_model(step.shape, shape_config(step.shape, None, plan.capacity))
        ctx = step.depth + MOST_TOKENS + 1
        needed = sum(SessionPlan.make(model, kv=step.kv, ctx=ctx, weights=plan.weights).parts().values())
        free = available_memory_bytes()
        if self._opened is not None:
            free += weights_bytes(self._opened[0], plan)  # in use already, or given back before the next is opened
        if needed > free:
            return f"needs {format_bytes(needed)} of memory, {format_bytes(free)} is free"
        return NO_TIME if time.perf_counter() > self._deadline else None

    def _open(self, step: Step) -> None:
        """Open the step's shape on its threads, made where it is not there; gives back the one that was open."""
        if self._opened == (step.shape, step.threads):
            return
        self._close(step.shape)
        plan, was_made = self.board.plan, is_store(weights_folder(step.shape, self.board.plan))
        begun = time.perf_counter()
        model = shape_model(step.shape, None, plan.capacity, plan.weights, self._progress)
        making_s = 0.0 if was_made else time.perf_counter() - begun
        form = model.weight_format(plan.weights)
        _reset_peak()
        begun = time.perf_counter()
        decoder = find_device("cpu").decoder(model, form, plan.capacity, step.threads, self._progress)
        self.decoder = decoder
        self._opened = step.shape, step.threads
        chosen = decoder.ops.threads
        before = next((s for s in self.board.shapes if s.name == step.shape), None)
        if before is None or step.threads == plan.threads:  # those that its rows are measured with
            facts = Shape(
                name=step.shape,
                parameters=model.n_parameters,
                layers=model.config.n_layers,
                weights=form.name,
                weights_bytes=model.weights_bytes(form),
                threads=decoder.threads,
                decode_threads=chosen.decode if chosen else decoder.threads,
                prompt_threads=chosen.prompt if chosen else decoder.threads,
                making_s=making_s + (before.making_s if before else 0.0),
                opening_s=time.perf_counter() - begun,
                opening_peak_bytes=peak_rss_bytes(),
            )
            self.board.shapes = [s for s in self.board.shapes if s is not before] + [facts]

    def _close(self, next_shape: str | None = None) -> None:
        """Give the open shape back; its weights go too, where this board made them and had time for all of it."""
        if self._opened is None:
            return
        (name, _), self._opened = self._opened, None
        del self.decoder
        was_made = any(s.name == name and s.making_s > 0 for s in self.board.shapes)
        if was_made and name != next_shape and time.perf_counter() < self._deadline:
            shutil.rmtree(weights_folder(name, self.board.plan), ignore_errors=True)

    def threads_row(self) -> ThreadsRow:
        """Time the shape with the number of threads that it was opened on."""
        assert self._opened is not None
        (shape, n_threads), plan, watch = self._opened, self.board.plan, Watch()
        timer = self._timer(plan.schemes[0], 0)
        watch.start()
        self._decode(timer, plan.seconds / 2)
        best = min(self._prompt(plan.schemes[0], plan.threads_prompt)[0] for _ in range(2))
        watch.stop()
        token_ms = _median_ms(timer.totals)
        return ThreadsRow(shape, n_threads or 1, token_ms, plan.threads_prompt / best, watch.span())

    def decode(self, kv: str, depth: int) -> Decode:
        """Time a token behind ``depth`` synthetic ones."""
        assert self._opened is not None
        _reset_peak()
        watch = Watch(self.metering.source.throttle)
        timer = self._timer(kv, depth)
        with self.metering.timed(watch):
            self._decode(timer, self.board.plan.seconds)
        return Decode(
            shape=self._opened[0],
            kv=kv,
            depth=depth,
            tokens=len(timer.totals),
            token_ms=_median_ms(timer.totals),
            token_ms_best=min(timer.totals) * 1e3,
            token_ms_p95=float(np.percentile(timer.totals, 95)) * 1e3,
            matmul_ms=timer.part_ms("matmul"),
            attention_ms=timer.part_ms("attention"),
            cache_bytes=sum(cache.nbytes for cache in timer.caches),
            bytes_read=self.decoder.weights.token_bytes + sum(cache.bytes_read() for cache in timer.caches),
            peak_memory_bytes=peak_rss_bytes(),
            span=watch.span(),
            energy=self.metering.per_token(watch, len(timer.totals), self.board.idle),
        )

    def prompt(self) -> Prompt:
        """Time a prompt of random tokens, read until `Plan.seconds` are over or MOST_PROMPTS are."""
        assert self._opened is not None
        _reset_peak()
        watch, plan, kv = Watch(self.metering.source.throttle), self.board.plan, self.board.plan.schemes[0]
        self._prompt(kv, WARM_UP_PROMPT)
        runs: list[tuple[float, float]] = []
        with self.metering.timed(watch):
            while len(runs) < MOST_PROMPTS and (not runs or time.perf_counter() - watch.begun < plan.seconds):
                runs.append(self._prompt(kv, plan.prompt))
        return Prompt(
            shape=self._opened[0],
            kv=kv,
            tokens=plan.prompt,
            runs=len(runs),
            tokens_per_s=plan.prompt / min(prefill for prefill, _ in runs),
            first_token_s=min(first for _, first in runs),
            peak_memory_bytes=peak_rss_bytes(),
            span=watch.span(),
            energy=self.metering.per_token(watch, plan.prompt * len(runs), self.board.idle),
        )

    def _timer(self, kv: str, depth: int) -> SchemeTimer:
        return SchemeTimer(self.decoder, CacheSpec.parse(kv), depth, MOST_TOKENS + 1)

    def _decode(self, timer: SchemeTimer, seconds: float) -> None:
        """Decode for so many seconds, at least LEAST_TOKENS and at most MOST_TOKENS."""
        begun = time.perf_counter()
        with blas_threads(1):
            for n in range(MOST_TOKENS):
                if n >= LEAST_TOKENS and time.perf_counter() - begun >= seconds:
                    break
                timer.decode(1)

    def _prompt(self, kv: str, n: int) -> tuple[float, float]:
        """Return the seconds that n tokens took through all layers, and those until the first token was chosen."""
        decoder = self.decoder
        ids = np.random.default_rng(0).integers(0, decoder.config.vocab_size, n)
        caches = open_caches(decoder, CacheSpec.parse(kv), n)
        sampler = Sampler(SamplingParams(), decoder.config.vocab_size)
        begun = time.perf_counter()
        with blas_threads(decoder.threads):
            x = decoder.prefill(decoder.embed(ids, 0), caches)
            prefilled = time.perf_counter()
            sampler.sample(decoder.head(x[-1:])[0])
        return prefilled - begun, time.perf_counter() - begun


def _reset_peak() -> None:
    """Free what was measured before (its caches are known to themselves), and count memory from here."""
    gc.collect()
    reset_peak_rss()


def _median_ms(seconds: list[float]) -> float:
    return float(np.median(seconds)) * 1e3
