"""The program of a rank's process: ``python -m pdlcheck.worlds.remote``."""

from __future__ import annotations

import sys

from pdlcheck.worlds.remote.serving import serve

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(serve())
