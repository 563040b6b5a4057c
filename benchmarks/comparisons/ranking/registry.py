"""All peers by name."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from ranking.loops import LOOPS
from ranking.ours import GUARANTEED, METHODS, PUBLISHED, TUNED
from ranking.packages import PACKAGES
from ranking.peer import INSTALL, Peer

__all__ = ["FOR_SPEED", "FOR_TRUTH", "VERSIONS", "chosen", "find"]

VERSIONS = (  # packages whose versions are saved with a result
    *("torch", "numpy", "scipy", "numba", "networkx", "igraph", "networkit", "rustworkx", "scikit-network"),
    *("graphblas-algorithms", "python-graphblas", "suitesparse-graphblas"),
)

RIGHT_OR_USUAL = ("scikit-network RH", "scikit-network diteration", "scikit-network piteration")
FOR_SPEED = [
    *(GUARANTEED, TUNED, *LOOPS),
    *(peer for peer in PACKAGES if "scikit-network" not in peer.name or peer.name in RIGHT_OR_USUAL),
]
FOR_TRUTH = [*METHODS, *PUBLISHED, *PACKAGES]


def find(name: str) -> Peer:
    """Return the peer with exactly this ``name``."""
    return next(peer for peer in [*FOR_SPEED, *FOR_TRUTH] if peer.name == name)


def chosen(peers: Iterable[Peer], wanted: str) -> list[Peer]:
    """Return the installed peers whose name contains one of the words, separated by commas; print what is missing."""
    peers, words = list(peers), [word.strip().lower() for word in wanted.split(",") if word.strip()]
    unknown = [word for word in words if not any(word in peer.name.lower() for peer in peers)]
    if unknown:
        raise SystemExit(f"--peers: no peer is called {unknown[0]!r}; there are {', '.join(p.name for p in peers)}")
    found = []
    for peer in peers:
        if words and not any(word in peer.name.lower() for word in words):
            continue
        if peer.installed:
            found.append(peer)
        else:
            print(f"left out: {peer.name} is not installed; `{INSTALL}` brings it", file=sys.stderr)
    return found
