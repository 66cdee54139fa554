"""`python -m edgekv`: the command line."""

import sys

from edgekv.cli import main

sys.exit(main())
