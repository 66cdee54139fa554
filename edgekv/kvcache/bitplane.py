"""bitplane (ours): `planes` of 4 bits; centres tell where signs are scanned, signs where the rest is read."""

from __future__ import annotations

import dataclasses

from edgekv.kvcache.knobs import number, tokens
from edgekv.kvcache.planes import Planes, PlanesKnobs


@dataclasses.dataclass(frozen=True)
class BitPlaneKnobs(PlanesKnobs):
    """`PlanesKnobs` with k_bits=4, v_bits=4, threshold=1.4e-4, residual_length=32 and key_scale=0.9."""

    scheme = "bitplane"

    k_bits: float = number(4.0, 1, 4, " bits")
    v_bits: float = number(4.0, 1, 4, " bits")
    threshold: float = number(1.4e-4, 1e-12, 1, ", a probability", or_zero=True)
    residual_length: int = tokens(32)
    key_scale: float = number(0.9, 0, 2)


class BitPlane(Planes):
    """`planes:k_bits=4,v_bits=4,threshold=1.4e-4`: few tokens are read in full."""

    name = "bitplane"
    version = 3  # with the deviations around centres
    paper = "ours"
    summary = "4-bit rotated keys and values in bit planes; keys' signs and the rest read where needed"
    gives_up = "tokens that their centres do not foretell; exact weights of unlikely ones"
    Knobs = BitPlaneKnobs
