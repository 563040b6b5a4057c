"""The command ``pdlcheck``, started as ``python -m pdlcheck``."""

import sys

from pdlcheck.cli import main

if __name__ == "__main__":
    sys.exit(main())
