"""Instructions of one decoded token on a Cortex-A76, by part: edgekv beside llama.cpp, counted by qemu.

    python tools/arm_count.py --model ../shared/models/llama-40m --depth 2048 \
        --llama BUILD/arm_count_llama --json docs/data/arm-count.json
    python tools/arm_page.py

Both run emulated (qemu's user mode with tools/arm_count_plugin.c, which counts every instruction) on one thread,
with int4 weights of the same shape and a synthetic cache. The token is decoded twice, as it is run and with
its parts marked; what the marks themselves take is subtracted. It says nothing of memory, threads or cycles.

Needs gcc and qemu-aarch64 6 to 8 with plugins (Debian 12's qemu-user), what tools/arm_emulated.sh fetches, and of
llama.cpp tools/arm_count_llama.cpp compiled against its static libraries:

    cmake -S LLAMA -B BUILD -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=OFF \
        -DGGML_OPENMP=OFF -DLLAMA_BUILD_COMMON=OFF -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
        -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
        -DCMAKE_C_FLAGS=-mcpu=cortex-a76 -DCMAKE_CXX_FLAGS=-mcpu=cortex-a76
    cmake --build BUILD --target llama
    aarch64-linux-gnu-g++ -O2 -std=c++17 -static -ILLAMA/include -ILLAMA/ggml/include tools/arm_count_llama.cpp \
        BUILD/src/libllama.a BUILD/ggml/src/libggml.a BUILD/ggml/src/libggml-cpu.a BUILD/ggml/src/libggml-base.a \
        -lpthread -ldl -lm -o BUILD/arm_count_llama
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import subprocess
import tempfile
from typing import Any

from arm_count_token import ATTENTION, LINEAR, REST, ROPE

from edgekv.kvcache import CacheSpec

ROOT = pathlib.Path(__file__).resolve().parent.parent
CPU = "cortex-a76"
PARTS = {"linear": LINEAR, "attention": ATTENTION, "rope": ROPE, "rest": REST}
SETTINGS = (("f16", "0"), ("f16", "1"), ("q8_0", "1"), ("q4_0", "1"))  # of the cache, and flash attention
SCHEMES = "dense,onebit,planes,kivi2,h1b"

Counts = list[tuple[int, int]]  # instructions and beginnings of each part


def read(text: str) -> list[Counts]:
    """Every line of the plugin."""
    lines = re.findall(r"^counts((?: \d+)+)$", text, re.MULTILINE)
    numbers = [[int(x) for x in line.split()] for line in lines]
    return [list(zip(line[::2], line[1::2], strict=True)) for line in numbers]


def by_part(whole: Counts, split: Counts, empty: Counts) -> dict[str, int]:
    """Of one token: whole as it was run, split with its parts marked, empty: marks alone.

    Between two marks there is one mark's own work. llama.cpp computes operations one by one where they are marked,
    which takes instructions of its own: what all parts have beyond the whole is taken off them by their number.
    """
    own = empty[REST][0] / empty[REST][1]
    counted = {name: split[part][0] - own * split[part][1] for name, part in PARTS.items()}
    total = whole[REST][0] - own * whole[REST][1]
    marks = {name: split[part][1] for name, part in PARTS.items() if part != REST}
    beyond = (sum(counted.values()) - total) / sum(marks.values())
    result = {name: round(n - beyond * marks.get(name, 0)) for name, n in counted.items()}
    return result | {"whole": round(total)}


def build_plugin(folder: pathlib.Path) -> pathlib.Path:
    plugin = folder / "parts.so"
    source = ROOT / "tools" / "arm_count_plugin.c"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", plugin, source], check=True)
    return plugin


def emulated(plugin: pathlib.Path, command: list[str], environment: dict[str, str]) -> str:
    qemu = ["qemu-aarch64", "-cpu", CPU, "-plugin", str(plugin), *command]
    done = subprocess.run(qemu, capture_output=True, text=True, check=False, env=os.environ | environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stderr


def count_llama(plugin: pathlib.Path, program: str, model: pathlib.Path, depth: int) -> list[dict[str, Any]]:
    """A row per setting of the cache."""
    rows = []
    for cache, flash in SETTINGS:
        _, empty, whole, split = read(emulated(plugin, [program, str(model), str(depth), flash, cache], {}))
        name = cache + (", flash attention" if flash == "1" else "")
        rows.append({"program": "llama.cpp", "cache": name} | by_part(whole, split, empty))
        print(rows[-1])
    return rows


def count_edgekv(plugin: pathlib.Path, folder: str, depth: int, schemes: str) -> list[dict[str, Any]]:
    """A row per scheme. What Numba has not compiled for the emulated processor it compiles: minutes."""
    environment = emulated_environment()
    root = pathlib.Path(environment.pop("root"))
    command = ["-L", str(root), "-0", str(root / "python"), str(root / "usr/bin/python3.11")]
    command += [str(ROOT / "tools" / "arm_count_token.py"), folder, str(depth), schemes]
    text = emulated(plugin, command, environment)
    head, *parts = re.split(r"^scheme (.*)$", text, flags=re.MULTILINE)
    empty, rows = read(head)[1], []
    for kv, part in zip(parts[::2], parts[1::2], strict=True):
        _, whole, _, split = read(part)
        rows.append({"program": "edgekv", "cache": CacheSpec.parse(kv).short} | by_part(whole, split, empty))
        print(rows[-1])
    return rows


def emulated_environment() -> dict[str, str]:
    """What tools/arm_emulated.sh gives its Python, and its root."""
    names = "PYTHONPATH", "PYTHONHOME", "NUMBA_CPU_NAME", "NUMBA_CACHE_DIR", "PYTHONDONTWRITEBYTECODE"
    script = f"import os, json; print(json.dumps({{n: os.environ[n] for n in {names}}}))"
    command = [ROOT / "tools" / "arm_emulated.sh", "python", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    environment: dict[str, str] = json.loads(done.stdout)
    return environment | {"root": environment["PYTHONHOME"].removesuffix("/usr")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, metavar="FOLDER", help="a Llama whose shape both decode")
    parser.add_argument("--depth", type=int, default=2048, help="tokens in the cache (default %(default)s)")
    parser.add_argument("--kv", default=SCHEMES, metavar="LIST", help="(default %(default)s)")
    parser.add_argument("--llama", metavar="PROGRAM", help="tools/arm_count_llama.cpp, compiled")
    parser.add_argument("--json", metavar="FILE", help="write the counts")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        plugin, rows = build_plugin(folder), []
        if arguments.llama:
            from compare_llamacpp import write_gguf

            from edgekv.models import architecture

            raw = json.loads((pathlib.Path(arguments.model) / "config.json").read_text())
            write_gguf(folder / "model.gguf", architecture(raw).config, raw)
            rows += count_llama(plugin, arguments.llama, folder / "model.gguf", arguments.depth)
        rows += count_edgekv(plugin, arguments.model, arguments.depth, arguments.kv)
    if arguments.json:
        facts = {"model": pathlib.Path(arguments.model).name, "depth": arguments.depth, "cpu": CPU, "tokens": rows}
        pathlib.Path(arguments.json).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
