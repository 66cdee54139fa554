"""What the papers' schemes and the baselines need of a backend."""
