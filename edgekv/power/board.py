"""`edgekv board`: its record, its measurements, and the run that fills a record and continues one."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NamedTuple

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

# The record: one JSON file with every measurement and the conditions around it

Number = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class Step(NamedTuple):
    """One measurement; n: threads that read memory, or tokens of the cache or the prompt."""

    what: Literal["bandwidth", "decode", "prompt"]
    shape: str
    n: int
    kv: str = ""

    @property
    def text(self) -> str:
        """Name it for people."""
        if self.what == "decode":
            return f"{self.shape}, {self.kv} at {self.n}"
        if self.what == "prompt":
            return f"{self.shape}, {self.kv}, prompt of {self.n}"
        return f"{self.shape}, {self.n} thread{'s' if self.n > 1 else ''}"


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
    """Cooling devices that the system names, governor and range of its cores, and the user's own words."""

    cooling: tuple[str, ...]
    clocks: tuple[str, ...]
    about: str


class Span(msgspec.Struct, frozen=True):
    """When something ran, and the state of the machine.

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
    """Per token: all that the meter sees, what the samples leave open of it, and the part above idle."""

    meter: Name
    mj_per_token: float
    error_mj: float | None
    net_mj_per_token: float | None
    average_w: float


class Idle(msgspec.Struct, frozen=True):
    """At rest, before everything; watts: None without a meter."""

    started: Number
    seconds: Number
    watts: float | None
    others: Share


class Bandwidth(msgspec.Struct, frozen=True, tag="bandwidth", tag_field="what"):
    """Memory read in order by so many threads together, the best of a few passes; 1e9 bytes per second."""

    threads: AtLeastOne
    gb_per_s: Number
    span: Span

    @property
    def step(self) -> Step:
        return Step("bandwidth", "memory", self.threads)


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
    def step(self) -> Step:
        return Step("decode", self.shape, self.depth, self.kv)


class Prompt(msgspec.Struct, frozen=True, tag="prompt", tag_field="what"):
    """A prompt into an empty cache, the best of ``runs``: its speed, and the seconds until its first token.

    The energy is per token of all runs.
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
    def step(self) -> Step:
        return Step("prompt", self.shape, self.tokens, self.kv)


Measured = Bandwidth | Decode | Prompt


class Shape(msgspec.Struct, frozen=True):
    """A model of random weights as it was opened here, and its threads, chosen at load or asked for.

    threads: of attention; decode_threads, prompt_threads: of weight products. making_s: seconds to draw its
    weights, 0 if they were there.
    """

    name: Name
    weights_bytes: Count
    threads: AtLeastOne
    decode_threads: AtLeastOne
    prompt_threads: AtLeastOne
    making_s: Number


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
    weights: str
    seconds: float
    idle_s: float
    threads: int | None = None

    @property
    def capacity(self) -> int:
        """Tokens that a decoder must be able to read."""
        return max(*self.depths, self.prompt) + MOST_TOKENS + 1

    def steps(self, cores: int) -> list[Step]:
        """List the measurements: memory, then shape by shape, its most telling first."""
        steps = [Step("bandwidth", "memory", n) for n in bandwidth_threads(cores)]
        first, shallow = self.schemes[0], self.depths[0]
        for shape in self.shapes:
            steps += [Step("decode", shape, shallow, first), Step("prompt", shape, self.prompt, first)]
            steps += [Step("decode", shape, depth, kv) for depth in self.depths[1:] for kv in self.schemes]
            steps += [Step("decode", shape, shallow, kv) for kv in self.schemes[1:]]
        return steps

    def config(self, shape: str) -> dict[str, Any]:
        """Return a shape's config, with positions for the whole plan."""
        return shape_config(shape, None, self.capacity)

    def weights_bytes(self, shape: str) -> int:
        """Count the bytes of a shape's weights; it need not be made."""
        model = unread_model(shape, self.config(shape))
        return model.weights_bytes(weight_format(self.weights, model.arch))

    def weights_folder(self, shape: str) -> pathlib.Path:
        """Where a shape's weights are in the cache folder, or would be."""
        config = self.config(shape)
        return random_folder(config, weight_format(self.weights, architecture(config)))


FULL = Plan(
    shapes=("qwen3-0.6b", "llama3.2-1b", "qwen3-1.7b", "llama3.2-3b", "qwen3-4b", "llama3.1-8b"),
    schemes=("dense", "onebit", "planes", "kivi2", "h1b"),
    depths=(0, 2048, 8192),
    prompt=512,
    weights="int4",
    seconds=3.0,
    idle_s=5.0,
)
QUICK = Plan(("tiny",), ("dense", "onebit"), (0, 256), 64, "int4", 0.05, 0.1)  # shows that everything runs


def bandwidth_threads(cores: int) -> list[int]:
    """List the numbers of threads that the bandwidth of memory is measured with."""
    return list(range(1, cores + 1)) if cores <= EVERY_NUMBER else sorted({1, 2, *candidates(cores)})


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
        rows = raw.get("measured")
        if isinstance(rows, list):  # files of before have rows by the number of threads, too
            rows = [row for row in rows if not (isinstance(row, dict) and row.get("what") == "threads")]
        return read_fields(raw | {"measured": rows}, cls, str(path), hint)


# Energy, and the conditions around a measurement


def open_meter(name: str = "auto") -> tuple[PowerSource, str]:
    """Open the meter at hand and describe it; without one its energies are None.

    Raises PowerError for a meter that is named and can't be read.
    """
    try:
        meter, notes = find_meter(name, device="cpu")
    except PowerError as error:
        if name != "auto":
            raise
        return Unmetered(str(error)), f"none: {error}"
    return PowerSampler(meter, notes=notes), f"{meter.name}: {meter.covers}"


class Watch:
    """The state of the machine around a measurement, from its making to `span`; `timed` times the block."""

    def __init__(self, source: PowerSource) -> None:
        self._source = source
        self._made_s, self._before, self._busy = time.perf_counter(), self._throttle(), _busy_s()

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Time the block, the meter read at both ends."""
        self._source.mark()
        self.started, self.begun = time.time(), time.perf_counter()
        yield
        self.ended = time.perf_counter()
        self._source.mark()

    def span(self) -> Span:
        """Describe all of it, up to now."""
        now = conditions.Conditions.now()
        return Span(
            started=self.started,
            seconds=self.ended - self.begun,
            took_s=time.perf_counter() - self._made_s,
            temperature_c=now.temperature_c,
            clock_mhz=now.clock_mhz,
            throttling=conditions.throttled_between(self._before, self._throttle()),
            others=self.others(),
        )

    def others(self) -> float:
        """Return the share of the cores' time that other programs have taken so far."""
        busy, own = (after - before for after, before in zip(_busy_s(), self._busy, strict=True))
        cores, seconds = max(psutil.cpu_count() or 1, all_cores()), time.perf_counter() - self._made_s
        return min(1.0, max(0.0, (busy - own) / (cores * seconds)))

    def window(self) -> Window | None:
        """Return the energy of the block; None: not measured."""
        return _window(self._source, self.begun, self.ended)

    def energy(self, tokens: int, idle: Idle | None) -> Energy | None:
        """Return the energy of so many tokens in the block; None: not measured."""
        window, name = self.window(), self._source.about().meter
        return _energy(name, window, tokens, idle.watts if idle else None) if window and name else None

    def _throttle(self) -> Throttle | None:
        return all_limits(conditions.throttle(), self._source.throttle())


def _busy_s() -> tuple[float, float]:
    """Return the seconds that all cores have worked, and that this process and its children have."""
    times, own = psutil.cpu_times(), psutil.Process().cpu_times()
    # Linux counts a guest's time as user time too.
    busy = sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)
    return busy - getattr(times, "guest_nice", 0.0), sum(own[:4])


def add_log(board: Board, path: str | os.PathLike[str]) -> None:
    """Put the energies of an external meter's log into every measurement that it covers, by the system's clock.

    Raises PowerError where it can't be used, or covers none of them.
    """
    log = CsvLog(path, wall_clock=time.time, clock=time.time)  # its times as they are: Unix seconds
    idle_w = None
    if board.idle and (rest := _window(log, board.idle.started, board.idle.started + board.idle.seconds)):
        idle_w = rest.average_w
        board.idle = msgspec.structs.replace(board.idle, watts=idle_w)
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


def _window(source: PowerSource, begun: float, ended: float) -> Window | None:
    with contextlib.suppress(PowerError):
        return source.window(begun, ended)
    return None


def _energy(meter: str, window: Window, tokens: int, idle_w: float | None) -> Energy:
    return Energy(
        meter=meter,
        mj_per_token=1e3 * window.joules / tokens,
        error_mj=None if window.error_j is None else 1e3 * window.error_j / tokens,
        net_mj_per_token=None if idle_w is None else 1e3 * (window.joules - idle_w * window.seconds) / tokens,
        average_w=window.average_w,
    )


class Run:
    """One run of `edgekv board`; ``board`` is written to ``path`` after every measurement.

    seconds: nothing begins after them. say: is told of every measurement, in a line.
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
        self._opened: str | None = None
        self.decoder: Decoder

    def go(self) -> None:
        """Measure all that there is time for. What raises an EdgeKVError is left out with its reason."""
        board = self.board
        board.left_out, board.finished = [], False
        self.source.start()
        try:
            if board.idle is None:
                board.idle = self._rest()
            done = {m.step for m in board.measured}
            for step in board.plan.steps(board.machine.cores):
                if step not in done:
                    self._try(step)
            self._close()
            board.finished = all(skipped.why != NO_TIME for skipped in board.left_out)
        finally:
            self.source.stop()
            board.save(self.path)

    def _rest(self) -> Idle:
        """Wait to see what the machine draws, and does, at rest."""
        watch = Watch(self.source)
        with watch.timed():
            time.sleep(self.board.plan.idle_s)
        window = watch.window()
        return Idle(watch.started, watch.ended - watch.begun, window.average_w if window else None, watch.others())

    def _try(self, step: Step) -> None:
        why = None if step.what == "bandwidth" else self._obstacle(step)
        if why is None:
            try:
                result, text = self.measure(step)
            except (EdgeKVError, MemoryError) as error:
                why = str(error) or "out of memory"
            else:
                self.board.measured.append(result)
                self.board.save(self.path)
                self._say(f"{step.text}: {text}")
        if why is not None:
            self.board.left_out.append(Skipped(step.text, why))

    def _obstacle(self, step: Step) -> str | None:
        """Say why the measurement can't be made now; None: nothing is in its way."""
        plan = self.board.plan
        model, ctx = unread_model(step.shape, plan.config(step.shape)), step.n + MOST_TOKENS + 1
        needed = sum(SessionPlan.make(model, kv=step.kv, ctx=ctx, weights=plan.weights).parts().values())
        free = available_memory_bytes()
        if self._opened is not None:
            free += plan.weights_bytes(self._opened)  # in use already, or given back before the next is opened
        if needed > free:
            return f"needs {format_bytes(needed)} of memory, {format_bytes(free)} is free"
        return NO_TIME if time.perf_counter() > self._deadline else None

    def measure(self, step: Step) -> tuple[Measured, str]:
        """Return the measurement, and its result in words."""
        if step.what == "bandwidth":
            read = self._bandwidth(step.n)
            return read, f"{read.gb_per_s:.1f} GB/s"
        self._open(step.shape)
        gc.collect()  # caches of earlier measurements are known to themselves
        reset_peak_rss()
        if step.what == "decode":
            decoded = self._decode(step)
            return decoded, f"{1e3 / decoded.token_ms:.2f} tokens/s"
        prompt = self._prompt(step)
        return prompt, f"{prompt.tokens_per_s:.1f} tokens/s, {prompt.first_token_s:.2f} s to the first"

    def _open(self, shape: str) -> None:
        """Open the shape, made where it is not there; gives back the one that was open."""
        if self._opened == shape:
            return
        self._close()
        plan, begun = self.board.plan, time.perf_counter()
        was_made = is_store(plan.weights_folder(shape))
        model = shape_model(shape, None, plan.capacity, plan.weights, self._progress)
        making_s = 0.0 if was_made else time.perf_counter() - begun
        form = model.weight_format(plan.weights)
        self.decoder = find_device("cpu").decoder(model, form, plan.capacity, plan.threads, self._progress)
        self._opened, chosen = shape, self.decoder.ops.threads
        before = next((s for s in self.board.shapes if s.name == shape), None)
        facts = Shape(
            name=shape,
            weights_bytes=model.weights_bytes(form),
            threads=self.decoder.threads,
            decode_threads=chosen.decode if chosen else self.decoder.threads,
            prompt_threads=chosen.prompt if chosen else self.decoder.threads,
            making_s=making_s + (before.making_s if before else 0.0),
        )
        self.board.shapes = [s for s in self.board.shapes if s is not before] + [facts]

    def _close(self) -> None:
        """Give the open shape back; its weights go too, where this board made them and had time for all of it."""
        if self._opened is None:
            return
        name, self._opened = self._opened, None
        del self.decoder
        was_made = any(s.name == name and s.making_s > 0 for s in self.board.shapes)
        if was_made and time.perf_counter() < self._deadline:
            shutil.rmtree(self.board.plan.weights_folder(name), ignore_errors=True)

    def _bandwidth(self, n_threads: int) -> Bandwidth:
        watch, probe = Watch(self.source), stream.Bandwidth(n_threads)
        with watch.timed():
            for _ in range(PASSES):
                probe.sample()
        return Bandwidth(n_threads, probe.best / 1e9, watch.span())

    def _decode(self, step: Step) -> Decode:
        """Time a token behind synthetic ones."""
        watch = Watch(self.source)
        timer = SchemeTimer(self.decoder, CacheSpec.parse(step.kv), step.n, MOST_TOKENS + 1)
        with blas_threads(1), watch.timed():
            deadline = time.perf_counter() + self.board.plan.seconds
            while len(timer.totals) < LEAST_TOKENS or time.perf_counter() < deadline:
                timer.decode(1)
                if len(timer.totals) == MOST_TOKENS:
                    break
        best, median, p95 = (float(ms) for ms in np.percentile(timer.totals, (0, 50, 95)) * 1e3)
        return Decode(
            shape=step.shape,
            kv=step.kv,
            depth=step.n,
            tokens=len(timer.totals),
            token_ms=median,
            token_ms_best=best,
            token_ms_p95=p95,
            matmul_ms=timer.part_ms("matmul"),
            attention_ms=timer.part_ms("attention"),
            cache_bytes=sum(cache.nbytes for cache in timer.caches),
            bytes_read=self.decoder.weights.token_bytes + sum(cache.bytes_read() for cache in timer.caches),
            peak_memory_bytes=peak_rss_bytes(),
            span=watch.span(),
            energy=watch.energy(len(timer.totals), self.board.idle),
        )

    def _prompt(self, step: Step) -> Prompt:
        """Time a prompt of random tokens, read until `Plan.seconds` are over or MOST_PROMPTS are."""
        watch = Watch(self.source)
        self._time_prompt(step.kv, WARM_UP_PROMPT)
        runs: list[tuple[float, float]] = []
        with watch.timed():
            deadline = time.perf_counter() + self.board.plan.seconds
            while len(runs) < MOST_PROMPTS and (not runs or time.perf_counter() < deadline):
                runs.append(self._time_prompt(step.kv, step.n))
        return Prompt(
            shape=step.shape,
            kv=step.kv,
            tokens=step.n,
            runs=len(runs),
            tokens_per_s=step.n / min(prefill for prefill, _ in runs),
            first_token_s=min(first for _, first in runs),
            peak_memory_bytes=peak_rss_bytes(),
            span=watch.span(),
            energy=watch.energy(step.n * len(runs), self.board.idle),
        )

    def _time_prompt(self, kv: str, n: int) -> tuple[float, float]:
        """Return the seconds that n tokens took through all layers, and those until the first token was chosen."""
        decoder = self.decoder
        ids = np.random.default_rng(0).integers(0, decoder.config.vocab_size, n)
        caches = open_caches(decoder, CacheSpec.parse(kv), n)
        sampler = Sampler(SamplingParams(temperature=0.0), decoder.config.vocab_size)
        begun = time.perf_counter()
        with blas_threads(decoder.threads):
            x = decoder.prefill(decoder.embed(ids, 0), caches)
            prefilled = time.perf_counter()
            sampler.sample(decoder.head(x[-1:])[0])
        return prefilled - begun, time.perf_counter() - begun
