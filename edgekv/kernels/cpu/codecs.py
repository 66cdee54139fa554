"""Which loops read which kind of codec."""

from edgekv.kernels.cpu import gather, interleaved_values, ints, planes, rows
from edgekv.kernels.cpu.loops import Loops
from edgekv.kernels.cpu.papers import fier, huffman, int4, kivi, mikv, quest, retrieval, signs, visual

KEYS: dict[str, Loops] = {
    "f16": rows.F16,
    "f32": rows.F32_ROWS,
    "symmetric_keys": ints.KEYS,
    "kivi_keys": kivi.KEYS,
    "token_keys": mikv.KEYS,
    "huffman_keys": huffman.KEYS,
    "levels": visual.LEVELS,
    "sign_index": fier.KEYS,
    "page_index": quest.KEYS,
    "signs": signs.SKETCH,
    "centred_planes": planes.CENTRED,
    "plane_keys": planes.CENTRED,
}

VALUES: dict[str, Loops] = {
    "f16": rows.F16,
    "f32": rows.F32_ROWS,
    "symmetric_values": ints.VALUES,
    "kivi_values": kivi.VALUES,
    "huffman_values": huffman.VALUES,
    "levels": visual.LEVELS,
    "int4": int4.INT4,
    "interleaved": interleaved_values.INTERLEAVED,
    "plane_values": gather.PLANE_VALUES,
}

CHOSEN: dict[str, tuple[Loops, Loops]] = {"f16": (retrieval.CHOSEN_F16, retrieval.CHOSEN_F16)}
"""For segments of which only chosen tokens are read, by the kind of the keys: loops of keys and of values."""
