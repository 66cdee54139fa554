"""The reference backend: each kernel as its formula, in NumPy. Slow, and the oracle of the others."""

from edgekv.kernels.reference.attend import append, attend, scores, sums
from edgekv.kernels.reference.bits import pack_sign_rows
from edgekv.kernels.reference.gather import encode_planes
from edgekv.kernels.reference.interleaved_values import encode_interleaved
from edgekv.kernels.reference.ints import encode_sym
from edgekv.kernels.reference.papers.evict import add_attention, evict_lowest, store_token
from edgekv.kernels.reference.papers.fier import encode_fier
from edgekv.kernels.reference.papers.huffman import (
    huffman_pack,
    huffman_sizes,
    quantize_channels,
    quantize_tokens,
)
from edgekv.kernels.reference.papers.int4 import encode_int4
from edgekv.kernels.reference.papers.kivi import encode_kivi_keys, encode_kivi_values
from edgekv.kernels.reference.papers.quest import encode_pages
from edgekv.kernels.reference.papers.retrieval import select_top
from edgekv.kernels.reference.papers.signs import pack_signs
from edgekv.kernels.reference.papers.visual import encode_levels
from edgekv.kernels.reference.planes import encode_centres, encode_keys
from edgekv.kernels.reference.rope import split_rope
from edgekv.kernels.reference.rotate import hadamard, hadamard_back
from edgekv.kernels.reference.rows import encode_f16, encode_f32, project
from edgekv.kernels.reference.softmax import softmax

__all__ = [
    "add_attention",
    "append",
    "attend",
    "encode_centres",
    "encode_f16",
    "encode_f32",
    "encode_fier",
    "encode_int4",
    "encode_interleaved",
    "encode_keys",
    "encode_kivi_keys",
    "encode_kivi_values",
    "encode_levels",
    "encode_pages",
    "encode_planes",
    "encode_sym",
    "evict_lowest",
    "hadamard",
    "hadamard_back",
    "huffman_pack",
    "huffman_sizes",
    "pack_sign_rows",
    "pack_signs",
    "project",
    "quantize_channels",
    "quantize_tokens",
    "scores",
    "select_top",
    "softmax",
    "split_rope",
    "store_token",
    "sums",
]
