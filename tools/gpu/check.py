"""Runs everything that needs a GPU: tests, then measurements. Prints a log and writes all as JSON.

usage: python tools/gpu/check.py [--out FOLDER] [--only SECTION ...] [--seconds 500]

A section that fails says so and the next one follows; none is begun after --seconds. FOLDER/gpu.json holds the
tables and every number behind them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import cupy  # noqa: E402
import measure  # noqa: E402

from edgekv.checkpoint.hub import load_shape  # noqa: E402

DEPTHS = (8192, 32768)
SCHEMES = ("dense", "h1b", "onebit", "planes", "kivi2", "int4", "kvcomp", "fier", "quest")
LONG = (("dense", 131072), ("h1b", 131072), ("onebit", 131072))  # one layer's worth
WHOLE = (
    *((text, 8192) for text in ("dense", "h1b", "onebit", "planes", "kivi2", "kvcomp")),
    *((text, 32768) for text in ("dense", "h1b", "onebit", "planes")),
)
BOARDS = {"Jetson Nano, 25.6 GB/s": 25.6e9, "Orin Nano, 68 GB/s": 68e9, "Orin Nano Super, 102 GB/s": 102e9}
TEST_SECONDS = 200


class Log:
    """Findings that are printed at once and kept for the JSON file."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.tables, self.facts = folder, {}, {}  # type: tuple[pathlib.Path, dict[str, str], dict[str, Any]]

    def table(self, name: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        print("\n".join(lines))
        for row in rows:
            lines.append(f"| {' | '.join(map(str, row))} |")
            print(lines[-1], flush=True)
        self.tables[name] = "\n".join(lines)

    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "gpu.json"
        path.write_text(json.dumps({"tables": self.tables, "facts": self.facts}, indent=1, default=str) + "\n")
        print(f"wrote {path}")


def machine(gpu: measure.Gpu, log: Log) -> None:
    runtime, properties = cupy.cuda.runtime, gpu.properties
    facts = {
        "gpu": properties["name"].decode(),
        "compute capability": f"{properties['major']}.{properties['minor']}",
        "multiprocessors": gpu.driver.multiprocessors,
        "L2 bytes": gpu.l2_bytes,
        "driver": runtime.driverGetVersion(),
        "CUDA runtime": runtime.runtimeGetVersion(),
        "NVRTC": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "CuPy": cupy.__version__,
        "copy GB/s, read and written": round(gpu.copy_bandwidth() / 1e9, 1),
    }
    log.facts |= facts
    log.table("machine", ("what", "value"), facts.items())


def tests(gpu: measure.Gpu, log: Log) -> None:
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("test_cuda_*.py"))
    workers = ["-n", str(min(14, os.cpu_count() or 1))] if importlib.util.find_spec("xdist") else []
    options = ["-rfE", "--tb=short", "-W", "default", "-k", "gpu or greedy or sessions", *workers]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "pytest", *options, *files]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TEST_SECONDS, check=False
        )
        text = done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        text = f"{(error.stdout or b'').decode()}\nstopped after {TEST_SECONDS} s"
    print(text[-9000:], flush=True)
    lines = [line for line in text.splitlines() if " passed" in line or " failed" in line or " error" in line]
    log.facts["tests"] = lines[-1] if lines else "no closing line"


def attention(gpu: measure.Gpu, log: Log) -> None:
    """Measures attention per layer, 32 heads of 128, one token: append and attend."""
    bandwidth, results = gpu.copy_bandwidth(), []

    def rows() -> Iterable[Sequence[object]]:
        plan = [*((text, depth) for depth in DEPTHS for text in SCHEMES), *LONG]
        for text, depth in plan:
            results.append(attempt(measure.attention, gpu, text, depth, bandwidth))
            yield row(results[-1], text, depth)

    def row(r: dict[str, Any] | None, text: str, depth: int) -> Sequence[object]:
        if r is None:
            return text, f"{depth:,}", "failed", *[""] * (4 + len(BOARDS))
        predicted = [f"{r['bytes'] / speed * 1e6:,.0f}" for speed in BOARDS.values()]
        speed = f"{r['gb_per_s']:,.0f}", f"{r['times_floor']:.2f}", r["layers"]
        return text, f"{depth:,}", f"{r['us']:.1f}", f"{r['bytes']:,}", *speed, *predicted

    head = "scheme", "tokens", "us/layer", "bytes read", "GB/s", "x floor", "layers"
    log.table("attention", (*head, *(f"predicted us, {board}" for board in BOARDS)), rows())
    log.facts["attention"] = [r for r in results if r]


def torch(gpu: measure.Gpu, log: Log) -> None:
    """Measures PyTorch's attention and cuBLAS's matrix-vector products on the same shapes."""

    def rows() -> Iterable[Sequence[object]]:
        for depth in DEPTHS:
            n, once = (4 if depth < 20000 else 2), depth * measure.HEADS * measure.HEAD_DIM * 2
            plan = (
                ("scaled_dot_product_attention, f16", 2 * once, measure.torch_attention, (depth, n)),
                ("cuBLAS f16 matvec: scores", once, measure.torch_matvec, (depth, n, False)),
                ("cuBLAS f16 matvec: values", once, measure.torch_matvec, (depth, n, True)),
            )
            for what, n_bytes, timed, arguments in plan:
                seconds = attempt(timed, *arguments)
                if seconds:
                    log.facts[f"{what} at {depth}"] = seconds
                    yield what, f"{depth:,}", f"{seconds * 1e6:.1f}", f"{n_bytes / seconds / 1e9:,.0f}"

    log.table("torch", ("PyTorch", "tokens", "us", "GB/s"), rows())


def profile(gpu: measure.Gpu, log: Log) -> None:
    """Measures each kernel of a token's attention by itself."""
    found = []

    def rows() -> Iterable[Sequence[object]]:
        for depth in DEPTHS:
            for text in SCHEMES:
                for kernel, n, seconds in attempt(measure.launches_of, gpu, text, depth, 8) or ():
                    found.append({"scheme": text, "depth": depth, "kernel": kernel, "n": n, "us": seconds * 1e6})
                    yield text, f"{depth:,}", f"`{kernel}`", n, f"{seconds * 1e6:.1f}"

    log.table("profile", ("scheme", "tokens", "kernel", "launches", "us/layer"), rows())
    log.facts["profile"] = found


def weights(gpu: measure.Gpu, log: Log) -> None:
    """Measures a matrix of 4,096 x 11,008 times one activation."""

    def rows() -> Iterable[Sequence[object]]:
        for name, seconds, n_bytes in measure.weight_products(gpu):
            yield name, f"{seconds * 1e6:.1f}", f"{n_bytes:,}", f"{n_bytes / seconds / 1e9:,.0f}"

    log.table("weights", ("form", "us", "bytes", "GB/s"), rows())


def prompts(gpu: measure.Gpu, log: Log) -> None:
    """Measures a layer's attention over a whole prompt, and one matrix of 4,096 x 11,008 times it."""

    def rows() -> Iterable[Sequence[object]]:
        for n in measure.PROMPTS:
            seconds, operations = measure.prefill_attention(gpu, n)
            yield "attention", f"{n:,}", f"{seconds * 1e6:.0f}", f"{operations / seconds / 1e12:.0f} TFLOP/s"
            other = attempt(measure.torch_attention, n, 1, n)
            if other:
                speed = f"{operations / other / 1e12:.0f} TFLOP/s"
                yield "PyTorch's scaled_dot_product_attention", f"{n:,}", f"{other * 1e6:.0f}", speed
            for what, seconds, amount in measure.prompt_products(gpu, n):
                unit, size = ("GB/s", 1e9) if "weights" in what else ("TFLOP/s", 1e12)
                yield what, f"{n:,}", f"{seconds * 1e6:.0f}", f"{amount / seconds / size:,.0f} {unit}"

    log.table("prompts", ("what", "tokens", "us", "speed"), rows())


def whole(gpu: measure.Gpu, log: Log) -> None:
    """Measures Llama 2 7B's shape with random weights, q4 and int4, and some tokens in the cache."""
    results = []

    def rows() -> Iterable[Sequence[object]]:
        for form, plan in (("q4", WHOLE[:4]), ("int4", WHOLE)):
            for r in measure.end_to_end(gpu, load_shape("llama2-7b"), form, plan):
                results.append(r | {"weights": form})
                if "ms" in r:
                    yield form, r["scheme"], f"{r['depth']:,}", f"{r['ms']:.1f}", *[""] * 6
                    continue
                energy = "" if r["mj_per_token"] is None else f"{r['mj_per_token']:.0f}"
                times = f"{r['ms_per_token']:.3f}", f"{r['ms_per_token_mean']:.3f}", energy
                counts = r["tokens"], r["replayed"], f"{r['bytes']:,}", f"{r['gb_per_s']:,.0f}"
                yield form, f"`{r['scheme']}`", f"{r['depth']:,}", *times, *counts

    head = (
        "weights",
        "scheme",
        "tokens before",
        "ms/token, median",
        "mean",
        "mJ/token",
        "tokens",
        "replayed",
        "bytes read",
        "GB/s",
    )
    log.table("whole", head, rows())
    log.facts["whole"] = results


def attempt(timed: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the measurement, or None after its traceback was printed."""
    try:
        return timed(*arguments)
    except Exception:
        traceback.print_exc()
        return None
    finally:
        cupy.get_default_memory_pool().free_all_blocks()


SECTIONS = {
    "machine": machine,
    "tests": tests,
    "weights": weights,
    "attention": attention,
    "torch": torch,
    "prompts": prompts,
    "whole": whole,
    "profile": profile,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="gpu-check", metavar="FOLDER")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--seconds", type=float, default=500)
    arguments = parser.parse_args()
    begin, log = time.perf_counter(), Log(pathlib.Path(arguments.out))
    gpu = measure.Gpu()
    for name in arguments.only:
        elapsed = time.perf_counter() - begin
        print(f"\n== {name} ({elapsed:.0f} s so far): {SECTIONS[name].__doc__ or ''}", flush=True)
        if elapsed > arguments.seconds:
            print("no time left")
            continue
        attempt(SECTIONS[name], gpu, log)
        log.write()
    print(f"done in {time.perf_counter() - begin:.0f} s; tests: {log.facts.get('tests')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
