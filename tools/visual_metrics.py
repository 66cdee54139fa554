"""Captions of scenes against what is in them: exact shares per attribute, and BLEU, ROUGE-L and CIDEr.

The texts are compared by pycocoevalcap, the code of the COCO caption challenge; its METEOR and SPICE need Java and
are left out, as is its tokenizer: words are lower-cased and punctuation is dropped, as that one does here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from visual_captions import accuracies, captions, score
from visual_scenes import Scene


def words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def text_metrics(written: Sequence[str], scenes: Sequence[Scene]) -> dict[str, float]:
    """BLEU-1 to BLEU-4, ROUGE-L and CIDEr over all captions, each against its scene's five phrasings."""
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge

    said = {i: [words(text)] for i, text in enumerate(written)}
    right = {i: [words(text) for text in captions(scene)] for i, scene in enumerate(scenes)}
    bleu, _ = Bleu(4).compute_score(right, said, verbose=0)
    metrics = {f"BLEU-{n}": float(value) for n, value in enumerate(bleu, 1)}
    for name, metric in (("ROUGE-L", Rouge()), ("CIDEr", Cider())):
        metrics[name] = float(metric.compute_score(right, said)[0])
    return metrics


def measures(written: Sequence[str], scenes: Sequence[Scene]) -> dict[str, object]:
    """Everything that is measured of captions: ``accuracy`` by attribute, ``by_things``, and the texts' metrics.

    by_things: the share of things that are right in every attribute, by how many there are.
    """
    tallies = [score(text, scene) for text, scene in zip(written, scenes, strict=True)]
    sizes = sorted({len(scene) for scene in scenes})
    parts = {n: [tally for tally, scene in zip(tallies, scenes, strict=True) if len(scene) == n] for n in sizes}
    return {
        "accuracy": _rounded(accuracies(tallies)),
        "by_things": {str(n): round(accuracies(part)["whole"], 4) for n, part in parts.items()},
        **_rounded(text_metrics(written, scenes)),
    }


def _rounded(values: dict[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else round(value, 4) for name, value in values.items()}
