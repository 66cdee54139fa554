"""Damaged and hostile inputs of every kind: each must end in success or an EdgeKVError. See `python -m tests.fuzz -h`."""
