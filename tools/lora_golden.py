"""Write tests/golden/lora.npz: float32 logits of transformers' models with the LoRAs of tests/lora_cases.py, which
PEFT merges into them.

usage: python tools/lora_golden.py      (needs torch, transformers and peft)
"""

from __future__ import annotations

import pathlib
import sys
import tempfile

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]

import golden  # noqa: E402
import golden_cases  # noqa: E402
import lora_cases  # noqa: E402


def merged_logits(name: str, folder: pathlib.Path) -> np.ndarray:
    """(n, vocab) float32, every third position."""
    import torch
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    case = lora_cases.CASES[name]
    base = golden.reference_model(golden_cases.write_checkpoint(case.model, folder / "base"))
    model = PeftModel.from_pretrained(base, lora_cases.write(name, folder / "lora"))
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    assert 2 * len(layers) == len(lora_cases.tensors(name)), "PEFT changes other modules"
    for layer in layers:
        layer.scale_layer(case.scale)
    merged = model.merge_and_unload()
    with torch.no_grad():
        logits = merged(torch.tensor([golden_cases.tokens(case.model)])).logits[0]
    return np.asarray(logits.float().numpy())[golden.KEPT]


def main() -> None:
    """Writes the file."""
    found = {}
    for name in lora_cases.CASES:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = merged_logits(name, pathlib.Path(folder))
    out = ROOT / "tests" / "golden" / "lora.npz"
    np.savez_compressed(out, **found)
    print(f"wrote {out.relative_to(ROOT)}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
