"""Writes tests/golden/packed.npz: a small random matrix as the libraries pack it, and what they unpack from that.

usage: python tools/golden/packed.py      (needs torch and compressed-tensors)

NAME/tensors/... are the tensors as they stand in a checkpoint, NAME/values the library's own float32 matrix.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

ROWS, COLUMNS = 12, 256


def matrix() -> np.ndarray:
    """Draws a matrix (ROWS, COLUMNS) float32, with a few large numbers."""
    rng = np.random.default_rng(7)
    w = rng.standard_normal((ROWS, COLUMNS)).astype(np.float32) * 0.1
    w[rng.random(w.shape) < 0.01] *= 6
    return w


def compressed(
    w: np.ndarray, bits: int, group: int, symmetric: bool, form: str, kind: str = "int"
) -> dict[str, Any]:
    """Packs by compressed-tensors. group 0: one scale per row."""
    import torch
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    args = QuantizationArgs(num_bits=bits, type=kind, symmetric=symmetric, **strategy)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = torch.from_numpy(w)
    parts = weight.reshape(ROWS, -1, group or COLUMNS)
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(form)
    packed = compressor.compress(dict(state), scheme)
    values = compressor.decompress(dict(packed), scheme)["weight"].float().numpy()
    return {"values": values, **{f"tensors/{name}": stored(tensor) for name, tensor in packed.items()}}


def stored(tensor: Any) -> np.ndarray:
    """Returns a tensor for a .npz file; FP8 as its bytes."""
    import torch

    return np.asarray((tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor).numpy())


def main() -> None:
    w, golden = matrix(), {}
    cases = {
        "w4a16": compressed(w, 4, 128, True, "pack-quantized"),
        "w4a16-asymmetric": compressed(w, 4, 32, False, "pack-quantized"),
        "w8a16": compressed(w, 8, 0, True, "pack-quantized"),
        "int8": compressed(w, 8, 0, True, "int-quantized"),
        "w8a16-float": compressed(w, 8, 0, True, "float-quantized", "float"),
    }
    for name, case in cases.items():
        golden |= {f"{name}/{key}": array for key, array in case.items()}
        print(
            f"{name}: largest change {np.abs(case['values'] - w).max():.4f}, "
            f"{sum(array.nbytes for key, array in case.items() if key != 'values')} bytes"
        )
    out = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden" / "packed.npz"
    np.savez_compressed(out, **golden)
    print(f"wrote {out.name}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
