"""``python -m fxboundary``: the command line, also under ``torchrun -m fxboundary``."""

import sys

from fxboundary.cli import main

if __name__ == "__main__":
    sys.exit(main())
