"""The program that mpiexec runs in place of a rank: it writes MPI's variables for the rank and keeps the place.

MPI recognises its ranks by environment variables, not by ancestry. So the ranks of a pool are forked from the fork
server, which has already imported torch, and get the variables that mpiexec gave to this process. The program needs
only the standard library, so it starts in milliseconds.
"""

from __future__ import annotations

import json
import os
import sys
from time import sleep

__all__ = ["main"]

_OURS = ("OMPI_", "OPAL_", "PMIX_", "PRTE_")
_LOOK_S = 0.5


def main(folder: str) -> None:
    """Write the variables to ``folder``/rank, print a line, and stay until mpiexec ends."""
    mpiexec = os.getppid()
    rank = os.environ["OMPI_COMM_WORLD_RANK"]
    place = os.path.join(folder, rank)
    with open(f"{place}.part", "w") as file:
        json.dump({name: value for name, value in os.environ.items() if name.startswith(_OURS)}, file)
    os.rename(f"{place}.part", place)
    print(flush=True)
    while os.getppid() == mpiexec:
        sleep(_LOOK_S)


if __name__ == "__main__":
    main(sys.argv[1])
