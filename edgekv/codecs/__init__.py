"""Codecs: how a run of tokens' keys, or values, is stored, a folder each.

A folder has the storage and its meaning in NumPy, and for each backend (cpu.py, cuda.py) what reads the packed
form. `edgekv.codecs.codec` is what they share, and what a codec of another package derives from.
"""
