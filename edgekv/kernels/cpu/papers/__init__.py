"""Numba loops of the papers' schemes and the baselines."""
