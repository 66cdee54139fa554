"""Keys and values of 4 bits in planes, of which a step reads what can matter."""

from __future__ import annotations

import numpy as np

from edgekv.kernels.contract.attention import LARGEST_F16
from edgekv.kernels.contract.planes import CENTRE, CENTRES, GAUSS_STEP, KEY_STEP
from edgekv.kernels.memory import contiguous
from edgekv.kvcache.codec_planes import CentredPlanes
from edgekv.kvcache.codecs import WORD, Codec
from edgekv.kvcache.geometry import Layout
from edgekv.types import F32


class TwoStageKeys(CentredPlanes):
    """`CentredPlanes` of 1 bit, and per token the three lower planes of the 4-bit code of r that it begins.

    ``deviation`` of every CENTRE tokens is the root mean square of r's elements: with the centre it tells which of
    them can matter, and only their blocks are scanned.
    """

    kind = "plane_keys"

    def __init__(self, n_kv_heads: int, capacity: int, head_dim: int, *, key_scale: float, seed: int) -> None:
        super().__init__(n_kv_heads, capacity, head_dim, bits=1, key_scale=key_scale, seed=seed)

    def layout(self) -> Layout:
        fine = (self.n_kv_heads, self.capacity, 3, self.width // WORD)
        deviation = (self.n_kv_heads, self.capacity // CENTRE)
        return super().layout() | {"fine": (fine, "uint64"), "deviation": (deviation, "uint16")}

    @property
    def estimate_bytes(self) -> int:
        """Of WORD tokens, all heads together: centres and deviations, which are read of all."""
        return self.n_kv_heads * (CENTRES * (self.width // 2 + 2) + WORD // CENTRE * 2)

    @property
    def scan_bytes(self) -> int:
        """Of WORD tokens, all heads together: signs and scales."""
        return self.n_kv_heads * WORD * (self.width // 8 + 2)

    @property
    def block_bytes(self) -> int:
        return self.estimate_bytes + self.scan_bytes

    @property
    def fine_bytes(self) -> int:
        """Of one token and head: what a corrected score reads beyond the scan."""
        return 3 * self.width // 8

    @property
    def token_bytes(self) -> int:
        return super().token_bytes + self.n_kv_heads * self.fine_bytes

    def bytes_of(self, n_tokens: int) -> int:
        return super().bytes_of(n_tokens) + n_tokens * self.n_kv_heads * self.fine_bytes

    def _encode_rest(self, residual: F32, t0: int) -> None:
        g, n, width = residual.shape
        square = (residual * residual).reshape(g, n // CENTRE, CENTRE * width).mean(axis=2)
        deviation = np.minimum(np.sqrt(square), LARGEST_F16).astype(np.float16).view(np.uint16)
        self.arrays["deviation"][:, t0 // CENTRE : (t0 + n) // CENTRE] = deviation
        step = self.arrays["scale"][:, t0 : t0 + residual.shape[1]].view(np.float16)
        step = step.astype(np.float32) * np.float32(KEY_STEP)
        half = 4 * step[..., None]
        residual -= np.where(residual >= 0, half, -half)
        self.kernels.encode_planes(residual, 2 * step, self.arrays["fine"], t0)


class TwoStageValues(Codec):
    """4 bits per element of P v in planes, the two upper ones apart from the lower; and the mean of every block.

    The sum is the second stage of ``keys``' scores: tokens with a probability of ``threshold`` or more are
    corrected by their lower key planes and read their values' planes, others count as their block's mean.
    """

    kind = "plane_values"

    def __init__(self, keys: TwoStageKeys, *, n_rep: int, threshold: float) -> None:
        super().__init__(keys.n_kv_heads, keys.capacity, keys.head_dim)
        self.keys, self.n_rep, self.threshold = keys, n_rep, threshold
        # tokens corrected and read in full, and blocks scanned, per KV head and query token, on average: of the
        # last attention
        self.counts = np.full(3, np.inf)

    def layout(self) -> Layout:
        g, capacity, width = self.n_kv_heads, self.capacity, self.keys.width
        planes = (g, capacity, 2, width // WORD)
        return {
            "top": (planes, "uint64"),
            "low": (planes, "uint64"),
            "scale": ((g, capacity), "uint16"),
            "means": ((g, capacity // WORD, width // 2, 1), "uint8"),
            "mean_scale": ((g, capacity // WORD), "uint16"),
        }

    @property
    def block_bytes(self) -> int:
        """Bytes of WORD tokens' mean, all heads together: all that is read of most."""
        return self.n_kv_heads * (self.keys.width // 2 + 2)

    @property
    def token_bytes(self) -> int:
        return self.n_kv_heads * (self.keys.width // 2 + 2) + -(-self.block_bytes // WORD)

    def chosen_bytes(self, n_tokens: int) -> int:
        """Bytes of the blocks and tokens chosen among n_tokens: as the last queries did, or at most."""
        corrected, full = np.minimum(self.counts[:2], min(n_tokens, self.n_rep / self.threshold))
        scanned, pair = min(self.counts[2], -(-n_tokens // WORD)), self.keys.width // 4
        of_head = corrected * (self.keys.fine_bytes + pair + 2) + full * pair
        return int(scanned * self.keys.scan_bytes + self.n_kv_heads * of_head)

    def encode(self, x: F32, t0: int) -> None:
        a, (g, n, _) = self.arrays, x.shape
        rotated = self.keys.rotation.forward(x, self.kernels)
        means = contiguous(rotated.reshape(g, n // WORD, WORD, -1).mean(axis=2))
        self.kernels.encode_sym(means, a["means"], a["mean_scale"], t0 // WORD)
        square = (rotated * rotated).sum(axis=2)
        step = np.sqrt(square / rotated.shape[2]) * np.float32(GAUSS_STEP[4])
        left = rotated.copy()
        self.kernels.encode_planes(left, 4 * step, a["top"], t0)
        self.kernels.encode_planes(left, step, a["low"], t0)
        along = square - (rotated * left).sum(axis=2)  # |x| ** 2 / (x . levels) is then the scale
        scale = step * square / np.where(along > 0, along, 1)
        a["scale"][:, t0 : t0 + n] = np.minimum(scale, LARGEST_F16).astype(np.float16).view(np.uint16)
