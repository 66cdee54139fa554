"""Compares edgekv with llama.cpp: what weights lose in either, then decode and prefill, in turns on one machine.

    python tools/bench/compare_llamacpp.py --llama BUILD/bin --shape llama2-7b --layers 4 --ctx 0,8192 \
        --model MODEL --text BOOK.txt --calibrate OTHER.txt --json compare.json

Loss, with --model: bits of a weight, perplexity's ratio to f32's and KL, rounded without a text and with 32,768
tokens of one (llama.cpp's by an importance matrix). Both read the same windows, with an exact cache, beside
edgekv's f32. Speed: random weights, which each round reads in processes of their own; printed are medians in
milliseconds per token, and how many times as fast as llama.cpp's best setting with each type of file.
Needs an idle machine, `pip install 'edgekv[dev]'`, and llama-bench, -quantize, -perplexity and -imatrix.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
import weight_quality
from safetensors.numpy import save_file
from weight_quality import WINDOW, Quality

from edgekv.checkpoint.hub import load_shape
from edgekv.engine.model import Model
from edgekv.files import create_folder_once
from edgekv.machine import machine_info
from edgekv.models import architecture

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests"))  # a writer of GGUF files
from gguf_writer import find_family, own_metadata, write_gguf

DECODE_TOKENS = 16
CALIBRATED = ", with a text"
# Options of llama-bench by the name of the KV setting; quantized values need flash attention.
SETTINGS = {
    "f16": ["-fa", "0"],
    "f16, flash attention": ["-fa", "1"],
    "q8_0": ["-fa", "1", "-ctk", "q8_0", "-ctv", "q8_0"],
    "q4_0": ["-fa", "1", "-ctk", "q4_0", "-ctv", "q4_0"],
}
Times = dict[tuple[str, str, str], list[float]]  # ms per token by format, KV setting, and depth or "prefill"


def llama(arguments: argparse.Namespace, program: str, *options: Any) -> str:
    """Runs a program of llama.cpp and returns what it writes to its standard output."""
    command = [str(arguments.llama / f"llama-{program}"), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout


def edgekv(*options: Any) -> None:
    command = [sys.executable, "-m", "edgekv", *map(str, options)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def random_files(arguments: argparse.Namespace, folder: pathlib.Path, raw: dict[str, Any]) -> None:
    """Writes KIND.gguf of each type: random weights of this shape as llama.cpp rounds them, no tokenizer."""
    rng, tensors = np.random.default_rng(0), {}
    for name, shape in architecture(raw).tensors().items():
        drawn = 0.02 * rng.standard_normal(shape, np.float32) if len(shape) > 1 else np.ones(shape, np.float32)
        tensors[name] = drawn.astype(np.float16)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    metadata = own_metadata(raw) | {"tokenizer.ggml.model": "no_vocab"}
    metadata[f"{find_family(raw).architecture}.vocab_size"] = raw["vocab_size"]
    source = write_gguf(folder, folder / "f16.gguf", "F16", tokenizer=False, metadata=metadata)
    (folder / "model.safetensors").unlink()
    for kind in arguments.gguf:
        llama(arguments, "quantize", source, folder / f"{kind}.gguf", kind)
    source.unlink()


def files_name(arguments: argparse.Namespace) -> str:
    """Returns a name for the folder of the random files: their shape and types, and a hash of what rounds them."""
    programs = sorted([arguments.llama / "llama-quantize", *arguments.llama.glob("lib*")])
    digest = hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in programs))
    return "-".join([arguments.shape, str(arguments.layers), *arguments.gguf, digest.hexdigest()[:12]])


def losses(arguments: argparse.Namespace, folder: pathlib.Path) -> dict[str, Quality]:
    """Returns what each format loses on the model, f32 and llama.cpp's F32 among them."""
    model, base, options = Model.open(arguments.model), folder / "base", ["-t", arguments.threads]
    windows = weight_quality.windows(model, arguments.text.read_text(), arguments.chunks)
    own = {name: weight_quality.opened(model, name) for name in arguments.weights}
    files = {"F32": write_gguf(pathlib.Path(model.path), folder / "F32.gguf", "F32")}
    rounded: dict[str, list[Any]] = {"": []}
    if arguments.calibrate:
        for name in arguments.weights:
            how = ["--weights", name, "--calibrate", arguments.calibrate, "--output", folder / name]
            edgekv("quantize", model.path, *how)
            own[name + CALIBRATED] = weight_quality.opened(Model.open(folder / name), "auto")
        matrix, limits = folder / "imatrix.gguf", f"-c {WINDOW} --chunks {32768 // WINDOW}".split()
        llama(arguments, "imatrix", "-m", files["F32"], "-f", arguments.calibrate, "-o", matrix, *limits, *options)
        rounded[CALIBRATED] = ["--imatrix", matrix]
    for end, given in rounded.items():
        for kind in arguments.gguf:
            files[kind + end] = folder / f"{kind}{end}.gguf"
            llama(arguments, "quantize", *given, files["F32"], files[kind + end], kind)
    with base.open("wb") as out:
        found = weight_quality.measured(model, own, windows, out)
    options += f"-c {WINDOW} -b {WINDOW} -fa off -ctk f32 -ctv f32 --kl-divergence".split()
    for name, file in files.items():
        lines, said = (r"Mean PPL\(Q\) +:", "Mean +KLD:", "Same top p:"), ""
        while lines[-1] not in said:  # it may exit before its last lines are written
            said = llama(arguments, "perplexity", "-m", file, "--kl-divergence-base", base, *options)
        perplexity, kl, top1 = (float(re.search(rf"{line} +([-.\d]+)", said)[1]) for line in lines)
        bits = weight_quality.bits(Model.open(file).weights.token_bytes, model)
        found[f"llama.cpp {name}"] = Quality(bits, perplexity, kl, top1 / 100)
    return found


def run_round(arguments: argparse.Namespace, files: pathlib.Path, folder: pathlib.Path, times: Times) -> None:
    """Adds a round's times."""
    tests = {depth: ["-p", 0, "-n", DECODE_TOKENS, "-d", depth] for depth in arguments.ctx}
    if arguments.prefill:
        tests["prefill"] = ["-p", arguments.prefill, "-n", 0]
    for kind in arguments.gguf:
        model = ["-m", files / f"{kind}.gguf", "-t", arguments.threads, "-r", 5, "-o", "json"]
        for setting in arguments.settings:
            for at, test in tests.items():
                (result,) = json.loads(llama(arguments, "bench", *model, *test, *SETTINGS[setting]))
                rate = statistics.median(result["samples_ts"])
                times.setdefault((f"llama.cpp {kind}", setting, at), []).append(1e3 / rate)
    for name in arguments.weights:
        out, shape = folder / "bench.json", ["--shape", arguments.shape, "--layers", arguments.layers]
        given = ["--weights", name, "--kv", arguments.kv, "--depth", ",".join(arguments.ctx), "--json", out]
        given += ["--prefill", arguments.prefill] if arguments.prefill else []
        edgekv("bench", *shape, *given, "--threads", arguments.threads, "--tokens", DECODE_TOKENS)
        facts = json.loads(out.read_text())
        for timing in facts["timings"]:
            times.setdefault((name, timing["kv"], str(timing["depth"])), []).append(timing["token_ms"])
        for prefill in facts["prefill"]:
            times.setdefault((name, prefill["kv"], "prefill"), []).append(1e3 / prefill["tokens_per_s"])


def summary(times: Times, kinds: list[str]) -> list[dict[str, Any]]:
    """Returns a row per format and setting at each depth, with ratios to llama.cpp's best of each type."""
    rows = []
    for at in dict.fromkeys(at for _, _, at in times):
        there = {(name, kv): all_ms for (name, kv, depth), all_ms in times.items() if depth == at}
        medians = {key: statistics.median(all_ms) for key, all_ms in there.items()}
        best = {kind: min(ms for key, ms in medians.items() if key[0] == f"llama.cpp {kind}") for kind in kinds}
        for (name, kv), ms in medians.items():
            faster = {kind: least / ms for kind, least in best.items()}
            text = f"{at:>8}  {name:<18}{','.join(kv.split(',')[:2]):<26}{ms:>9.3f} ms"
            text += "".join(f"  x{ratio:.2f} of {kind}" for kind, ratio in faster.items())
            row = {"depth": at, "weights": name, "setting": kv, "ms": ms, "all_ms": there[name, kv]}
            rows.append(row | {"times_faster": faster, "text": text})
    return rows


def main() -> None:
    def names(given: str) -> list[str]:
        return given.split(",")

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama", required=True, metavar="FOLDER", type=pathlib.Path, help="with llama-bench")
    parser.add_argument("--shape", default="llama2-7b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ctx", default="0,8192", type=names, help="depths (default %(default)s)")
    parser.add_argument("--kv", default="dense,onebit,planes")
    parser.add_argument("--weights", default="q4", type=names, help="edgekv's formats (default %(default)s)")
    parser.add_argument("--gguf", default="Q4_0,Q4_K_M", type=names, help="llama.cpp's (default %(default)s)")
    parser.add_argument("--prefill", type=int, default=512, help="prompt to time (default %(default)s; 0: none)")
    parser.add_argument("--files", metavar="FOLDER", type=pathlib.Path, help="keeps random weights for later runs")
    parser.add_argument("--rounds", type=int, default=3, help="of speed (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--settings", default=list(SETTINGS), type=lambda s: s.split(";"), help="separated by ;")
    parser.add_argument("--model", metavar="PATH", help="of which to measure the loss")
    parser.add_argument("--text", type=pathlib.Path, help="that the model reads")
    parser.add_argument("--calibrate", type=pathlib.Path, help="another text, to round with")
    parser.add_argument("--chunks", type=int, default=40, help="windows of the text (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.model and not arguments.text:
        parser.error("--model needs --text, which the model reads")
    facts: dict[str, Any] = {"settings": {key: str(value) for key, value in vars(arguments).items()}}
    times: Times = {}
    with tempfile.TemporaryDirectory() as place:
        if arguments.model:
            found = losses(arguments, pathlib.Path(place))
            print(weight_quality.table(found), flush=True)
            facts["losses"] = {name: row._asdict() for name, row in found.items()}
        if arguments.rounds:
            raw = load_shape(arguments.shape, arguments.layers, 65536)
            kept = (arguments.files or pathlib.Path(place)) / files_name(arguments)
            files = create_folder_once(kept, lambda path: random_files(arguments, path, raw))
        for turn in range(arguments.rounds):
            print(f"round {turn + 1} of {arguments.rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
            run_round(arguments, files, pathlib.Path(place), times)
    rows = summary(times, arguments.gguf)
    print("\n".join(row.pop("text") for row in rows))
    if arguments.json:
        facts |= {"results": rows, "machine": machine_info()}
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
