"""Tokens per second of several conversations that decode together, against one alone.

usage: python tools/slots_speed.py [SHAPE] [--layers N] [--depth N] [--kv NAME] [--slots N ...]

A model of random int4 weights; each conversation has a prompt of ``depth`` tokens in its cache and a thread of its
own. Rounds of all numbers of conversations take turns; medians of 3. At the end one of them reads another prompt
while the others decode: the longest time that one of those had to wait for a token.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from edgekv.decoder.decoder import Decoder
from edgekv.kvcache import CacheSpec
from edgekv.machine import all_cores
from edgekv.quality.shape_model import shape_model
from edgekv.session.caches import open_caches
from edgekv.session.devices import find_device
from edgekv.session.model_runner import ModelRunner
from edgekv.session.schedule import SHARED_CHUNK, OneAtATime, Schedule, Together
from edgekv.session.state import State

TOKENS, ROUNDS = 24, 3


def conversation(decoder: Decoder, schedule: Schedule, spec: CacheSpec, depth: int, seed: int) -> ModelRunner:
    """With ``depth`` random tokens in its caches."""
    c = decoder.config
    ctx = 4 * depth + 512
    runner = ModelRunner(State(open_caches(decoder, spec, ctx), c.keys_change), decoder, schedule, ctx, 0)
    runner.append(np.random.default_rng(seed).integers(0, c.vocab_size, depth).tolist(), [])
    return runner


def write(runner: ModelRunner, n: int) -> list[float]:
    """n tokens; returns the seconds of each."""
    seconds = []
    for token in range(1, n + 1):
        begin = time.perf_counter()
        runner.add(token)
        runner.next_logits()
        seconds.append(time.perf_counter() - begin)
    runner.end_text()
    return seconds


def speed(runners: list[ModelRunner]) -> float:
    """Tokens per second of all in sum."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(len(runners)) as pool:
        list(pool.map(lambda runner: write(runner, TOKENS), runners))
    return len(runners) * TOKENS / (time.perf_counter() - begin)


def longest_wait(runners: list[ModelRunner], depth: int) -> tuple[float, float]:
    """Seconds of reading ``depth`` more tokens in the first, and the longest wait of the others meanwhile."""
    ended = threading.Event()
    waits: list[float] = []

    def others(runner: ModelRunner) -> None:
        while not ended.is_set():
            waits.extend(write(runner, 1))

    with ThreadPoolExecutor(len(runners)) as pool:
        for runner in runners[1:]:
            pool.submit(others, runner)
        begin = time.perf_counter()
        runners[0].append([1] * depth, [])
        seconds = time.perf_counter() - begin
        ended.set()
    return seconds, max(waits)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", nargs="?", default="llama2-7b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--depth", type=int, default=512)
    parser.add_argument("--kv", default="onebit")
    parser.add_argument("--slots", type=int, nargs="*", default=[1, 2, 4])
    options = parser.parse_args()
    model = shape_model(options.shape, options.layers, 4 * options.depth, "int4")
    form = model.weight_format("int4")
    decoder: Decoder = find_device("cpu").decoder(model, form, 4 * options.depth + 512, all_cores(None), None)
    decoder.chunk = min(decoder.chunk, SHARED_CHUNK)
    alone: Schedule = OneAtATime(decoder.threads)
    together, spec, most = Together(decoder.threads), CacheSpec.parse(options.kv), max(options.slots)
    runners = [conversation(decoder, together if i else alone, spec, options.depth, i) for i in range(most + 1)]
    write(runners[0], 4)
    speed(runners[1:])
    found: dict[int, list[float]] = {n: [] for n in options.slots}
    for _ in range(ROUNDS):
        for n in options.slots:
            found[n].append(speed(runners[:1] if n == 1 else runners[1 : n + 1]))
    first = statistics.median(found[options.slots[0]])
    for n, values in found.items():
        value = statistics.median(values)
        print(f"{n} conversations: {value:.1f} tokens/s in sum, x{value / first:.2f}", flush=True)
    seconds, wait = longest_wait(runners[1:], options.depth)
    print(f"a prompt of {options.depth} tokens read in {seconds:.1f} s beside: longest wait {1e3 * wait:.0f} ms")


if __name__ == "__main__":
    main()
