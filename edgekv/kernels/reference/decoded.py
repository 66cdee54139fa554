"""Codecs without loops of their own: what they decode to is read."""

from edgekv.kernels.reference.loops import Loops

LOOPS = {"decoded": Loops(decode=lambda codec, t0, t1: codec.decode(t0, t1))}
