"""Writes tests/golden/gguf.json: what llama.cpp's converter writes of the models of tests/golden_cases.py.

usage: python tools/golden/gguf_files.py LLAMA_CPP [--keep FOLDER]      (needs torch, transformers)

LLAMA_CPP: its sources. Of each file, in float32, the metadata of its architecture, and of each tensor its shape
and the CRC-32 of its bytes; there is no vocabulary. ``--keep``: where to put them, each beside its checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys
import tempfile
import zlib
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

import golden_cases  # noqa: E402

from edgekv.checkpoint.gguf import Header  # noqa: E402


def convert(folder: pathlib.Path, out: pathlib.Path) -> None:
    """Converts by the converter, which chooses by the config's ``architectures``."""
    import gguf
    import torch
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    config = ModelBase.load_hparams(folder, False)
    chosen = get_model_class(get_model_architecture(config, ModelType.TEXT))
    without = type(chosen.__name__, (chosen,), {"set_vocab": _no_vocabulary, "model_arch": chosen.model_arch})
    with torch.inference_mode():
        without(folder, gguf.LlamaFileType.ALL_F32, out, eager=True).write()


def _no_vocabulary(model: Any) -> None:
    model.gguf_writer.add_tokenizer_model("none")
    if "vocab_size" not in {key.rpartition(".")[2] for part in model.gguf_writer.kv_data for key in part}:
        model.gguf_writer.add_vocab_size(model.hparams["vocab_size"])


def contents(path: pathlib.Path) -> dict[str, Any]:
    """Returns what the file holds, for JSON."""
    header, data = Header(path), path.read_bytes()
    own = header.metadata["general.architecture"]
    tensors = {
        name: [list(tensor.shape), zlib.crc32(data[tensor.start : tensor.start + 4 * math.prod(tensor.shape)])]
        for name, tensor in sorted(header.tensors.items())
    }
    values = {key: value for key, value in sorted(header.metadata.items()) if key.startswith(f"{own}.")}
    return {"architecture": own, "metadata": values, "tensors": tensors}


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("llama_cpp", type=pathlib.Path)
    parser.add_argument("--keep", type=pathlib.Path)
    options = parser.parse_args()
    sys.path[:0] = [str(options.llama_cpp / "gguf-py"), str(options.llama_cpp)]
    found = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, config in golden_cases.GGUF_CASES.items():
            folder = (options.keep or pathlib.Path(temporary)) / name
            golden_cases.CASES[name] = config
            golden_cases.write_checkpoint(name, folder)
            named = config | {"architectures": [golden_cases.GGUF_ARCHITECTURES[config["model_type"]]]}
            (folder / "config.json").write_text(json.dumps(named))
            words = {f"w{i}": i for i in range(golden_cases.VOCAB)}  # Gemma's rows are counted by it
            (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}, "added_tokens": []}))
            convert(folder, folder / "model.gguf")
            (folder / "tokenizer.json").unlink()
            found[name] = contents(folder / "model.gguf")
    out = ROOT / "tests" / "golden" / "gguf.json"
    out.write_text(json.dumps(found, indent=None, separators=(",", ":")) + "\n")
    print(f"wrote {out.relative_to(ROOT)}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
