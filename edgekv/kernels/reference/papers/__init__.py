"""The papers' schemes and the baselines, in NumPy."""
