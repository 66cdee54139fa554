"""What a token must cost on a board: predicted milliseconds and joules, from bytes, cycles and bandwidth.

    python tools/arm/roofline.py --shape llama2-7b --kv dense,onebit --ctx 8192 --board raspberry-pi-5
    python tools/arm/roofline.py --check --bench bench.json     of edgekv bench --shape NAME --json bench.json

A prediction, not a measurement. A token reads every weight and what `KVCache.bytes_read` counts, once, at the
board's bandwidth; meanwhile all cores do the attention in the cycles that llvm-mca gives its loops
(docs/lab/data/arm-asm.json, by asm.py). The longer of the two is the attention's time. The weights'
products are taken to fit beside their bytes. Energy is that time by the watts of the whole board while it decodes.

Beside each prediction is what `edgekv board` must print: tokens per second between the prediction's, less
TOLERANCE, and those of a board that reads as much more than the published rate as the best report. Slower refutes
the cycles or the bytes, faster the rate.

`--check` predicts a run of `edgekv bench` on this machine from the bytes alone, at the rates that its first dense
run achieved with the weights and with the cache, as a board's published rate is one that decoding achieved.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np

from edgekv.checkpoint.shipped import load_shape
from edgekv.cli.options import token_counts
from edgekv.kernels import numba_kernels
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.cache import Geometry, KVCache, Workspace
from edgekv.models import architecture
from edgekv.models.architecture import Architecture
from edgekv.power.conditions import BoardProfile as Board
from edgekv.power.conditions import board_profiles as boards
from edgekv.weights.formats import WEIGHTS, specs_bytes, store_specs

COUNTS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "lab" / "data" / "arm-asm.json"
SHARE_OF_PEAK = 10.5 / 17.1  # of its peak, decoding on a Raspberry Pi 5: taken where nothing is published
BEST_SHARE = 12.4 / 10.5  # the best published rate of a Raspberry Pi 5, of what most reports give
TOLERANCE = 0.25


HEAD_DIM = 128  # that cycles are counted for
FILL_TOKENS = 512  # synthetic keys and values drawn at a time

# The processor in the counts.
PROCESSORS = {
    "Cortex-A57": "cortex-a57",
    "Cortex-A72": "cortex-a57",  # the same instruction set, compiled alike
    "Cortex-A76": "cortex-a76",
    "Cortex-A78AE": "cortex-a78ae",
}

# Of the whole board while a CPU or GPU decodes, in watts, as published.
DECODING_W = {
    "raspberry-pi-5": (11.6, "llama 3.1 8B in 4 bits through ollama, at the wall"),
    "jetson-nano": (4.7, "gemma 3 1B in 4 bits"),
    "jetson-orin-nano": (15.0, "its power mode's limit: at most"),
}


Tokens = dict[str, float]  # kernel in the counts -> tokens that one query head does with it


def _dense(cache: Any) -> Tokens:
    width = {"f16": "f16", "f32": "f16", "q8": "8-bit"}[cache.knobs.dtype]
    return dict.fromkeys((f"scores {width}", f"values {width}", "softmax"), cache.n_seen)


def _all(*names: str) -> Callable[[Any], Tokens]:
    return lambda cache: dict.fromkeys((*names, "softmax"), cache.n_seen)


def _planes(cache: Any) -> Tokens:
    exact, knobs = cache.n_seen - cache.n_packed, cache.knobs
    names = f"{knobs.k_bits}-bit scan", "centres", "weights in bytes", f"{knobs.v_bits}-bit values"
    return dict.fromkeys(names, cache.n_packed) | {
        "scores f16": exact,
        "values f16": exact,
        "softmax": cache.n_seen,
    }


def _fier(cache: Any) -> Tokens:
    return {"fier scores": cache.n_seen} | dict.fromkeys(("scores f16", "values f16", "softmax"), cache.knobs.k)


# Schemes whose cycles are counted; of others only the bytes are.
SCHEMES: dict[str, Callable[[Any], Tokens]] = {
    "dense": _dense,
    "int4": _all("scores 4-bit", "values 4-bit"),
    "planes": _planes,
    "onebit": _planes,
    "fier": _fier,
}


@dataclasses.dataclass(frozen=True)
class Need:
    """What one token needs, all layers together: bytes, and cycles of the attention (None: not counted)."""

    weights_bytes: int
    cache_bytes: int
    cycles: float | None


def weights_bytes(arch: Architecture, weights: str) -> int:
    """That one token reads: all but the tables, of which it takes a row."""
    tables = arch.tables()
    specs = store_specs(arch, WEIGHTS[weights], dict.fromkeys(tables, "F32"))
    return specs_bytes({name: spec for name, spec in specs.items() if name not in tables})


def filled_cache(spec: CacheSpec, geometry: Geometry) -> KVCache:
    """One layer's cache, full but for one token, after a query: keys and values as `edgekv bench` draws them."""
    cache: KVCache = spec.scheme(geometry, spec.knobs)
    cache.allocate(numba_kernels(), Workspace())
    rng = np.random.default_rng(0)
    g, d = geometry.n_kv_heads, geometry.head_dim
    drift = np.zeros((g, 1, d), np.float32)
    depth = geometry.capacity - 1
    for start in range(0, depth, FILL_TOKENS):
        n = min(FILL_TOKENS, depth - start)
        drift += rng.standard_normal(drift.shape, np.float32)
        k = rng.standard_normal((g, n, d), np.float32) + drift
        v = rng.standard_normal(k.shape, np.float32)
        q = rng.standard_normal((geometry.n_heads, n, d), np.float32) / np.float32(np.sqrt(d))
        if start:
            cache.extend(k, v)
        else:
            cache.prefill(q, k, v)
            type(cache).finish_prefill([cache])
    q, k, v = (rng.standard_normal((heads, 1, d), np.float32) for heads in (geometry.n_heads, g, g))
    cache.attend(q / np.float32(np.sqrt(d)), k + drift, v)
    return cache


def cycles(cache: KVCache, counts: Sequence[dict[str, Any]]) -> float | None:
    """Of one layer and token, all query heads, on one core. None: the scheme is not counted."""
    if cache.name not in SCHEMES:
        return None
    by_kernel, total, n_rep = {row["kernel"]: row for row in counts}, 0.0, cache.geometry.n_rep
    for kernel, tokens in SCHEMES[cache.name](cache).items():
        part = by_kernel[together(kernel, n_rep, by_kernel)]["cycles_per_token"] * tokens * cache.geometry.n_heads
        total += part if kernel == "softmax" else part * cache.geometry.head_dim / HEAD_DIM
    return total


def together(kernel: str, n_rep: int, names: Container[str]) -> str:
    """The loop that does as many of n_rep rows at once as there is one for."""
    for rows in (4, 2):
        if rows <= n_rep and f"{kernel}, {rows} rows" in names:
            return f"{kernel}, {rows} rows"
    return kernel


def need_of(arch: Architecture, weights: str, cache: KVCache, counts: Sequence[dict[str, Any]] | None) -> Need:
    n_layers = len(arch.config.attending)
    work = cycles(cache, counts) if counts else None
    return Need(
        weights_bytes=weights_bytes(arch, weights),
        cache_bytes=n_layers * cache.bytes_read() + state_bytes(arch),
        cycles=work and n_layers * work,
    )


def state_bytes(arch: Architecture) -> int:
    """Read for a token by the layers that do not attend."""
    found = [shape for each in arch.config.recurrences if each is not None for shape in each.state().values()]
    return 4 * sum(math.prod(shape) for shape in found)


def caches(
    arch: Architecture, specs: Sequence[CacheSpec], depths: Sequence[int]
) -> list[tuple[str, int, KVCache]]:
    """(scheme, depth, first layer's cache) of every scheme at every depth."""
    c = arch.config
    result = []
    for depth in depths:
        for spec in specs:
            geometry = Geometry(
                c.n_heads, c.n_kv_heads, c.head_dim, depth + 1, 0, len(c.attending), c.layer_windows[0]
            )
            result.append((str(spec), depth, filled_cache(spec, geometry)))
    return result


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Milliseconds per token; ``bound`` says what attention waits for. joules: None where no power is known.

    tokens_per_s: least and most that a measurement may give without refuting the prediction.
    """

    token_ms: float
    weights_ms: float
    attention_ms: float
    bound: str
    joules: float | None
    tokens_per_s: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Machine:
    """Bytes of weights and of cache that it reads per second, and cycles per second of all cores together."""

    weights_rate: float
    cache_rate: float
    cycles_rate: float = 0.0
    watts: float | None = None


def predict(need: Need, machine: Machine) -> Prediction:
    weights, memory, work = need.weights_bytes / machine.weights_rate, need.cache_bytes / machine.cache_rate, 0.0
    if machine.cycles_rate and need.cycles is not None:
        work = need.cycles / machine.cycles_rate
    attention = max(memory, work)
    total = weights + attention
    least = weights / BEST_SHARE + max(memory / BEST_SHARE, work)
    return Prediction(
        token_ms=total * 1e3,
        weights_ms=weights * 1e3,
        attention_ms=attention * 1e3,
        bound="cycles" if work > memory else "memory",
        joules=None if machine.watts is None else machine.watts * total,
        tokens_per_s=((1 - TOLERANCE) / total, 1 / least),
    )


def machine_of(key: str, board: Board) -> Machine:
    rate = (board.measured_gb_s or board.peak_gb_s * SHARE_OF_PEAK) * 1e9
    watts = DECODING_W[key][0] if key in DECODING_W else None
    cycles = board.cores * board.clock_mhz * 1e6 if board.cpu in PROCESSORS else 0.0
    return Machine(rate, rate, cycles, watts)


def predictions(arch: Architecture, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """For each board its assumptions in words and a prediction for each scheme at each depth."""
    counts = json.loads(COUNTS.read_text(encoding="utf-8"))
    held = caches(arch, CacheSpec.parse_list(arguments.kv), token_counts("--ctx", arguments.ctx, 1))
    result = []
    for key in arguments.board or boards():
        board = boards()[key]
        processor = PROCESSORS.get(board.cpu)
        rows = counts["cpus"].get(processor) if processor else None
        predicted = []
        for text, depth, cache in held:
            need = need_of(arch, arguments.weights, cache, rows)
            fits = need.weights_bytes + len(arch.config.attending) * cache.nbytes < max(board.ram_gib) << 30
            prediction = dataclasses.asdict(predict(need, machine_of(key, board)))
            predicted.append({"kv": text, "depth": depth, "fits": fits} | prediction)
        result.append(
            {"board": board.name, "assumed": assumptions(key, board, counts["models"]), "predictions": predicted}
        )
    return result


def print_boards(found: list[dict[str, Any]]) -> None:
    for board in found:
        print(f"\nPREDICTED for {board['board']}: {board['assumed']}")
        columns = f"{'ms/token':>10}{'weights':>9}{'attention':>11}  {'bound by':<9}{'J/token':>8}{'tokens/s':>13}"
        print(f"{'kv':<26}{'depth':>7}{columns}")
        for p in board["predictions"]:
            joules = "n/a" if p["joules"] is None else f"{p['joules']:.2f}"
            times = f"{p['token_ms']:>10.1f}{p['weights_ms']:>9.1f}{p['attention_ms']:>11.1f}"
            room = "" if p["fits"] else "  more than its RAM"
            least, most = p["tokens_per_s"]
            must = f"{least:>7.2f} - {most:.2f}"
            print(f"{p['kv'][:25]:<26}{p['depth']:>7}{times}  {p['bound']:<9}{joules:>8}{must}{room}")


def assumptions(key: str, board: Board, models: dict[str, str]) -> str:
    if board.measured_gb_s:
        reading = f"{board.measured_gb_s:g} GB/s published"
    else:
        share = f"{SHARE_OF_PEAK:.0%} of {board.peak_gb_s:g}"
        reading = f"{board.peak_gb_s * SHARE_OF_PEAK:.1f} GB/s ({share}, the Pi 5's share)"
    cores = f"{board.cores} x {board.cpu} at {board.clock_mhz} MHz"
    model = models.get(PROCESSORS.get(board.cpu, ""))
    width = f"cycles of LLVM's {model}" if model else "bytes only, no cycles counted"
    watts, source = DECODING_W.get(key, (None, None))
    return f"{cores}, {width}; {reading}; " + (f"{watts:g} W ({source})" if watts else "no power known")


def achieved(bench: dict[str, Any], weights: int, n_layers: int) -> Machine:
    """The rates at which the benchmark's first dense run read weights and cache."""
    dense = next((t for t in bench["timings"] if t["kv"].startswith("dense")), None)
    if dense is None:
        raise SystemExit("--check needs a run with --kv dense,...: what it achieves is what is predicted with")
    attention_ms = n_layers * dense["attention_ms_layer"]
    return Machine(
        weights_rate=weights / (dense["token_ms"] - attention_ms) * 1e3,
        cache_rate=n_layers * dense["bytes_read_layer"] / attention_ms * 1e3,
    )


def check(bench: dict[str, Any]) -> tuple[Machine, list[tuple[str, int, float, float]]]:
    """(scheme, depth, predicted ms, measured ms) per token of what `edgekv bench` timed."""
    settings = bench["settings"]
    n_layers, rows = settings["layers"], []
    weights = weights_bytes(architecture(load_shape(settings["model"], n_layers)), settings["weights"])
    machine = achieved(bench, weights, n_layers)
    for t in bench["timings"]:
        need = Need(weights, n_layers * t["bytes_read_layer"], None)
        rows.append((t["kv"], t["depth"], predict(need, machine).token_ms, t["token_ms"]))
    return machine, rows


def print_check(path: str) -> None:
    bench = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    settings = bench["settings"]
    machine, rows = check(bench)
    print(
        f"{settings['model']}, {settings['layers']} layers, {settings['weights']} weights, {settings['threads']} "
        f"threads of {bench['machine']['cpu']}; memory read at {bench['bandwidth'] / 1e9:.1f} GB/s, by the first "
        f"dense run weights at {machine.weights_rate / 1e9:.1f} and cache at {machine.cache_rate / 1e9:.1f}"
    )
    print(f"{'kv':<28}{'depth':>7}{'predicted ms':>14}{'measured ms':>13}{'measured / predicted':>22}")
    for kv, depth, predicted, measured in rows:
        ratio = measured / predicted
        verdict = "" if abs(ratio - 1) <= TOLERANCE else f"  off by more than {TOLERANCE:.0%}"
        print(f"{kv[:27]:<28}{depth:>7}{predicted:>14.2f}{measured:>13.2f}{ratio:>22.2f}{verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llama2-7b", help="a name under models/ (default %(default)s)")
    parser.add_argument("--weights", default="int4", choices=sorted(WEIGHTS), help="(default %(default)s)")
    parser.add_argument("--kv", default="dense,planes,onebit", metavar="LIST", help="(default %(default)s)")
    parser.add_argument("--ctx", default="8192", metavar="LIST", help="tokens in the cache (default %(default)s)")
    parser.add_argument("--board", action="append", choices=sorted(boards()), help="by default all")
    parser.add_argument("--json", metavar="FILE", help="write the predictions")
    parser.add_argument("--check", action="store_true", help="predict what --bench measured on this machine")
    parser.add_argument("--bench", metavar="FILE", help="of edgekv bench --shape NAME --json FILE")
    arguments = parser.parse_args()
    if arguments.check != bool(arguments.bench):
        parser.error("--check and --bench FILE go together")
    if arguments.check:
        print_check(arguments.bench)
    else:
        found = predictions(architecture(load_shape(arguments.shape)), arguments)
        print_boards(found)
        if arguments.json:
            asked = {"shape": arguments.shape, "weights": arguments.weights}
            pathlib.Path(arguments.json).write_text(json.dumps(asked | {"boards": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
