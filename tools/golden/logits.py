"""Writes tests/golden/logits.npz: transformers' float32 logits of the tiny random models in tests/golden_cases.py,
and under NAME/greedy the tokens with which it continues a prompt; and tests/golden/lora.npz: logits of the models
with the LoRAs of tests/lora_cases.py, which PEFT merges into them.

usage: python tools/golden/logits.py [NAME ...]      (all if none is named; needs '.[torch]')
       python tools/golden/logits.py --lora          (needs peft, too)
"""

import pathlib
import sys
import tempfile
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import golden_cases  # noqa: E402
import lora_cases  # noqa: E402

PROMPT, GREEDY = 20, 28  # tokens of a prompt, and of the text behind it
KEPT = slice(None, None, 3)  # every third position keeps the file small


def reference_model(folder: pathlib.Path) -> Any:
    """Returns transformers' own implementation."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def reference_logits(folder: pathlib.Path, tokens: list[int]) -> np.ndarray:
    """Returns the logits (n, vocab) float32 of transformers' own implementation."""
    import torch

    with torch.no_grad():
        return np.asarray(reference_model(folder)(torch.tensor([tokens])).logits[0].float().numpy())


def reference_text(folder: pathlib.Path, tokens: list[int], n: int) -> np.ndarray:
    """Returns the n tokens with which transformers continues a prompt, the likeliest one each time."""
    import torch

    model = reference_model(folder)
    model.generation_config.eos_token_id = None  # of a larger vocabulary
    prompt = torch.tensor([tokens])
    options = {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "do_sample": False}
    whole = model.generate(prompt, max_new_tokens=n, **options)
    return np.asarray(whole[0, len(tokens) :].numpy(), np.int16)


def merged_logits(name: str, folder: pathlib.Path) -> np.ndarray:
    """Returns every third position's logits (n, vocab) float32."""
    import torch
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    case = lora_cases.CASES[name]
    base = reference_model(golden_cases.write_checkpoint(case.model, folder / "base"))
    model = PeftModel.from_pretrained(base, lora_cases.write(name, folder / "lora"))
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    assert 2 * len(layers) == len(lora_cases.tensors(name)), "PEFT changes other modules"
    for layer in layers:
        layer.scale_layer(case.scale)
    merged = model.merge_and_unload()
    with torch.no_grad():
        logits = merged(torch.tensor([golden_cases.tokens(case.model)])).logits[0]
    return np.asarray(logits.float().numpy())[KEPT]


def main() -> None:
    if sys.argv[1:] == ["--lora"]:
        found = {}
        for name in lora_cases.CASES:
            with tempfile.TemporaryDirectory() as folder:
                found[name] = merged_logits(name, pathlib.Path(folder))
        np.savez_compressed(ROOT / "tests" / "golden" / "lora.npz", **found)
        return
    out = ROOT / "tests" / "golden" / "logits.npz"
    golden = dict(np.load(out)) if out.is_file() else {}
    golden = {name: array for name, array in golden.items() if name.partition("/")[0] in golden_cases.CASES}
    for name in sys.argv[1:] or golden_cases.CASES:
        with tempfile.TemporaryDirectory() as folder:
            path = golden_cases.write_checkpoint(name, pathlib.Path(folder))
            tokens = golden_cases.tokens(name)
            golden[name] = reference_logits(path, tokens)[KEPT]
            golden[f"{name}/greedy"] = reference_text(path, tokens[:PROMPT], GREEDY)
        print(f"{name}: |logits| up to {np.abs(golden[name]).max():.2f}")
    out.parent.mkdir(exist_ok=True)
    np.savez_compressed(out, **golden)
    print(f"wrote {out.relative_to(ROOT)}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
