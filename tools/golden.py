"""Write tests/golden/logits.npz: transformers' float32 logits of the tiny random models in tests/golden_cases.py.

usage: python tools/golden.py      (needs torch and transformers: pip install '.[torch]')
"""

import pathlib
import sys
import tempfile

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import golden_cases  # noqa: E402

KEPT = slice(None, None, 3)  # every third position keeps the file small


def reference_logits(folder: pathlib.Path, tokens: list[int]) -> np.ndarray:
    """(n, vocab) float32 logits of transformers' own implementation."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return np.asarray(model.eval()(torch.tensor([tokens])).logits[0].float().numpy())


def main() -> None:
    golden = {}
    for name in golden_cases.CASES:
        with tempfile.TemporaryDirectory() as folder:
            path = golden_cases.write_checkpoint(name, pathlib.Path(folder))
            golden[name] = reference_logits(path, golden_cases.tokens(name))[KEPT]
        print(f"{name}: |logits| up to {np.abs(golden[name]).max():.2f}")
    out = ROOT / "tests" / "golden" / "logits.npz"
    out.parent.mkdir(exist_ok=True)
    np.savez_compressed(out, **golden)
    print(f"wrote {out.relative_to(ROOT)}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
