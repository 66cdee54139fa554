"""Damaged and hostile inputs of every kind: each must end in success or an EdgeKVError.

`python -m tests.fuzz -h` says how to run it.
"""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parent.parent))  # the tests' helpers, which make the whole inputs
