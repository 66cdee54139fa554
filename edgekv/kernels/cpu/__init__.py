"""The fast backend: Numba on all threads of a CPU, with explicit vectors where LLVM would not find them."""

from edgekv.kernels.cpu.append import append
from edgekv.kernels.cpu.attend import attend
from edgekv.kernels.cpu.centres import encode_centres
from edgekv.kernels.cpu.gather import encode_planes
from edgekv.kernels.cpu.interleaved_values import encode_interleaved
from edgekv.kernels.cpu.ints import encode_sym
from edgekv.kernels.cpu.papers.evict import add_attention, evict_lowest, store_token
from edgekv.kernels.cpu.papers.fier import encode_fier
from edgekv.kernels.cpu.papers.huffman import huffman_pack, huffman_sizes
from edgekv.kernels.cpu.papers.int4 import encode_int4
from edgekv.kernels.cpu.papers.kivi import encode_kivi_keys, encode_kivi_values
from edgekv.kernels.cpu.papers.levels import quantize_channels, quantize_tokens
from edgekv.kernels.cpu.papers.quest import encode_pages
from edgekv.kernels.cpu.papers.retrieval import select_top
from edgekv.kernels.cpu.papers.signs import pack_sign_rows, pack_signs
from edgekv.kernels.cpu.papers.visual import encode_levels
from edgekv.kernels.cpu.planes import encode_keys
from edgekv.kernels.cpu.ranges import scores, sums
from edgekv.kernels.cpu.rope import split_rope
from edgekv.kernels.cpu.rotate import hadamard, hadamard_back
from edgekv.kernels.cpu.rows import encode_f16, encode_f32, project
from edgekv.kernels.cpu.softmax import softmax

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
