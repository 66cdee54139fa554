"""Compares decode and prefill of a shape in edgekv and in llama.cpp, in turns on one machine.

    python tools/bench/compare_llamacpp.py --llama-bench BUILD/bin/llama-bench --shape llama2-7b --layers 4 \
        --ctx 0,8192 --kv onebit,planes --prefill 512 --rounds 3 --json compare.json

Random weights in equal shapes: Q4_0 in a GGUF file written here, --weights for edgekv (q4; docs/quality.md
has what either loses). Each round runs llama-bench once for each KV setting and `edgekv bench` once for all
schemes, each in a process of its own; printed are medians over the rounds in milliseconds per token, and how
many times faster edgekv is than llama.cpp's best setting. Needs `pip install 'edgekv[gguf]'`, and llama-bench
of llama.cpp (any version that knows -d).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import gguf
import numpy as np

from edgekv.checkpoint.hub import load_shape
from edgekv.files import cache_root, create_folder_once
from edgekv.machine import machine_info
from edgekv.models import architecture
from edgekv.models.config import ModelConfig

Q4_0 = gguf.GGMLQuantizationType.Q4_0
DECODE_TOKENS = 16
# Options of llama-bench by the name of the KV setting; quantised values need flash attention.
SETTINGS = {
    "f16": ["-fa", "0"],
    "f16, flash attention": ["-fa", "1"],
    "q8_0": ["-fa", "1", "-ctk", "q8_0", "-ctv", "q8_0"],
    "q4_0": ["-fa", "1", "-ctk", "q4_0", "-ctv", "q4_0"],
}


def write_gguf(path: pathlib.Path, c: ModelConfig, raw: dict[str, Any]) -> None:
    """Writes a Llama of this shape with random Q4_0 matrices and no tokenizer."""
    writer, rng = gguf.GGUFWriter(str(path), "llama"), np.random.default_rng(0)
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.n_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.n_heads)
    writer.add_head_count_kv(c.n_kv_heads)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_vocab_size(c.vocab_size)
    writer.add_tokenizer_model("no_vocab")

    def matrix(name: str, rows: int, columns: int) -> None:
        blocks = rng.integers(0, 256, (rows, columns // 32, 18), np.uint8)
        blocks[:, :, :2] = np.frombuffer(np.float16(0.02 / 4.6).tobytes(), np.uint8)  # codes' deviation is 4.6
        writer.add_tensor(name, blocks.reshape(rows, -1), raw_dtype=Q4_0)

    matrix("token_embd.weight", c.vocab_size, c.hidden_size)
    matrix("output.weight", c.vocab_size, c.hidden_size)
    writer.add_tensor("output_norm.weight", np.ones(c.hidden_size, np.float32))
    for i in range(c.n_layers):
        for name, rows, columns in (
            ("attn_q", c.q_size, c.hidden_size),
            ("attn_k", c.kv_size, c.hidden_size),
            ("attn_v", c.kv_size, c.hidden_size),
            ("attn_output", c.hidden_size, c.q_size),
            ("ffn_gate", c.intermediate_size, c.hidden_size),
            ("ffn_up", c.intermediate_size, c.hidden_size),
            ("ffn_down", c.hidden_size, c.intermediate_size),
        ):
            matrix(f"blk.{i}.{name}.weight", rows, columns)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(c.hidden_size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_bench(program: str, model: pathlib.Path, threads: int, options: list[str]) -> dict[str, Any]:
    """Runs llama-bench once and returns its result."""
    command = [program, "-m", str(model), "-t", str(threads), "-r", "1", "-o", "json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    results: list[dict[str, Any]] = json.loads(done.stdout)
    return results[0]


def edgekv_bench(arguments: argparse.Namespace, ctx: str) -> dict[str, Any]:
    """Returns what `edgekv bench --json` writes."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "bench.json"
        command = [sys.executable, "-m", "edgekv", "bench", "--shape", arguments.shape]
        command += ["--weights", arguments.weights]
        command += ["--layers", str(arguments.layers), "--kv", arguments.kv, "--depth", ctx, "--json", str(out)]
        command += ["--threads", str(arguments.threads), "--tokens", str(DECODE_TOKENS)]
        if arguments.prefill:
            command += ["--prefill", str(arguments.prefill)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        facts: dict[str, Any] = json.loads(out.read_text())
        return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-bench", required=True, metavar="PATH")
    parser.add_argument("--shape", default="llama2-7b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ctx", default="0,8192", help="depths, comma-separated (default %(default)s)")
    parser.add_argument("--kv", default="dense,onebit,planes")
    parser.add_argument("--weights", default="q4", help="edgekv's format (default %(default)s)")
    parser.add_argument("--prefill", type=int, default=512, help="prompt to time (default %(default)s; 0: none)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--settings", default=";".join(SETTINGS), help="of llama.cpp, separated by ;")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    raw = load_shape(arguments.shape, arguments.layers, 65536)
    config = architecture(raw).config
    name = f"{arguments.shape}-{arguments.layers}-q4_0"
    folder = create_folder_once(
        cache_root() / "gguf" / name, lambda path: write_gguf(path / "model.gguf", config, raw)
    )
    model, depths = folder / "model.gguf", arguments.ctx.split(",")
    theirs: dict[tuple[str, str], list[float]] = {}  # (setting, depth or "prefill") -> ms per token
    ours: dict[tuple[str, str], list[float]] = {}
    bandwidth = 0.0
    for turn in range(arguments.rounds):
        for setting in arguments.settings.split(";"):
            options = SETTINGS[setting]
            for depth in depths:
                result = llama_bench(
                    arguments.llama_bench,
                    model,
                    arguments.threads,
                    ["-p", "0", "-n", str(DECODE_TOKENS), "-d", depth, *options],
                )
                theirs.setdefault((setting, depth), []).append(1e3 / result["avg_ts"])
            if arguments.prefill:
                options = ["-p", str(arguments.prefill), "-n", "0", *options]
                result = llama_bench(arguments.llama_bench, model, arguments.threads, options)
                theirs.setdefault((setting, "prefill"), []).append(1e3 / result["avg_ts"])
        facts = edgekv_bench(arguments, arguments.ctx)
        bandwidth = max(bandwidth, facts["bandwidth"])
        for timing in facts["timings"]:
            ours.setdefault((timing["kv"], str(timing["depth"])), []).append(timing["token_ms"])
        for prefill in facts["prefill"]:
            ours.setdefault((prefill["kv"], "prefill"), []).append(1e3 / prefill["tokens_per_s"])
        print(f"round {turn + 1} of {arguments.rounds}", file=sys.stderr)
    rows = summary(theirs, ours, [*depths, "prefill"] if arguments.prefill else depths)
    print(f"{arguments.shape}, {arguments.layers} layers; memory read at {bandwidth / 1e9:.1f} GB/s")
    print("\n".join(row["text"] for row in rows))
    if arguments.json:
        facts = {
            "results": [{key: value for key, value in row.items() if key != "text"} for row in rows],
            "settings": {
                key: value for key, value in vars(arguments).items() if key not in ("json", "llama_bench")
            },
            "bandwidth": bandwidth,
            "machine": machine_info(),
        }
        pathlib.Path(arguments.json).write_text(json.dumps(facts, indent=1) + "\n")


def summary(
    theirs: dict[tuple[str, str], list[float]], ours: dict[tuple[str, str], list[float]], depths: list[str]
) -> list[dict[str, Any]]:
    """Returns a row per program and setting at each depth, with the ratio to llama.cpp's best there."""
    rows = []
    for depth in depths:
        best = min(statistics.median(times) for (_, at), times in theirs.items() if at == depth)
        for program, table in (("llama.cpp", theirs), ("edgekv", ours)):
            for (setting, at), times in table.items():
                if at != depth:
                    continue
                ms = statistics.median(times)
                text = f"{depth:>8}  {program:<10}{setting.partition(':')[0]:<22}{ms:>9.3f} ms  x{best / ms:.2f}"
                row = {"depth": depth, "program": program, "setting": setting, "ms": ms, "all_ms": times}
                rows.append(row | {"times_faster": best / ms, "text": text})
    return rows


if __name__ == "__main__":
    main()
