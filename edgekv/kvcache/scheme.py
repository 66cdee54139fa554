"""What a KV scheme says of itself, without a cache: its names, its knobs, and which layers and devices suit it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class Scheme:
    """Class attributes of every `KVCache`. Those without a value must be given one; others describe exceptions.

    name: as in ``--kv name``. paper: where it is from. summary, gives_up: what is kept, and what is lost, each a
    phrase for the README's table. Knobs: a frozen dataclass with defaults; its ``aliases``, where it has them,
    name fields as they were called before.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]
    gives_up: ClassVar[str]
    Knobs: ClassVar[type]

    aliases: ClassVar[tuple[str, ...]] = ()
    """Names that it had before, still understood."""
    version: ClassVar[int] = 1
    """Of what the arrays mean: a saved cache of another one is refused."""
    packs_like: ClassVar[tuple[str, ...]] = ()
    """Other schemes, whose kernels it comes to use as it fills."""
    bytes_knob: ClassVar[str | None] = None
    """The knob that bounds all layers' bytes: a session's `kv_budget`."""
    exact_when_short: ClassVar[bool] = False
    """No loss beyond f16 rounding for the first 64 tokens."""
    sees_queries: ClassVar[bool] = False
    """`KVCache.prefill` needs the queries of the whole prompt."""
    tidies_alike: ClassVar[bool] = True
    """`KVCache.tidy` differs from time to time in counters alone: no array is replaced."""

    def __init_subclass__(cls) -> None:
        cls.aliases = cls.__dict__.get("aliases", ())  # those of another scheme are not inherited

    @classmethod
    def exact_on_text(cls, knobs: Any) -> bool:
        """Whether text loses nothing but f16 rounding: then there is nothing to gate."""
        return False

    @classmethod
    def caps_scores(cls, knobs: Any) -> bool:
        """Whether it can bound scores softly (`Geometry.score_cap`)."""
        return True

    @classmethod
    def window_codecs(cls, knobs: Any) -> Callable[[int, int, int], tuple[Any, Any]] | None:
        """How a sliding layer may keep its window alone: codecs of keys and values by KV heads, tokens, head_dim.

        None: it is kept as other layers are. Such a layer must lose no more than the others do. It is kept so
        only where that takes fewer bytes.
        """
        return None

    @classmethod
    def kinds(cls, knobs: Any) -> set[str] | None:
        """Of the codecs that its segments can have: a device that reads them all can run the scheme.

        None: the policy works on arrays of the host.
        """
        return None
