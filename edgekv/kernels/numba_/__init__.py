"""The fast backend: Numba on all threads of a CPU, with explicit vectors where LLVM would not find them."""

from edgekv.kernels.numba_.dense import encode_f16, scores_f16, scores_f32, values_f16, values_f32
from edgekv.kernels.numba_.int4 import encode_int4, values_int4
from edgekv.kernels.numba_.rope import split_rope
from edgekv.kernels.numba_.signs import pack_sign_rows, pack_signs, scores_signs
from edgekv.kernels.numba_.softmax import softmax

__all__ = [
    "encode_f16",
    "encode_int4",
    "pack_sign_rows",
    "pack_signs",
    "scores_f16",
    "scores_f32",
    "scores_signs",
    "softmax",
    "split_rope",
    "values_f16",
    "values_f32",
    "values_int4",
]
