"""The papers' schemes and the baselines, a folder each: they enter as other packages do, by entry points."""
