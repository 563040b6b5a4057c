"""The Debian 12 packages that most others depend on: PageRank of the dependency graph that pdlcheck ships.

python examples/pagerank.py --top 10
"""

from __future__ import annotations

import argparse
import time

from pdlcheck.primitives.pagerank import debian_dependencies, pagerank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--top", type=int, default=10, help="how many packages; default: %(default)s")
    parser.add_argument("--damping", type=float, default=0.85, help="default: %(default)s")
    parser.add_argument("--tol", type=float, default=1e-8, help="largest L1 error; default: %(default)s")
    options = parser.parse_args()
    graph = debian_dependencies()
    start = time.perf_counter()
    result = pagerank(graph, damping=options.damping, tol=options.tol)
    seconds = time.perf_counter() - start
    print(f"{graph.num_nodes} packages, {graph.num_edges} dependencies, {result.iterations} rounds in {seconds:.2f} s")
    print(f"error below {result.error_bound:.1e}, scores add up to {result.scores.sum():.9f}")
    for place, node in enumerate(result.scores.argsort()[::-1][: options.top], start=1):
        print(f"{place:3}  {graph.names[node]:20} {result.scores[node]:.9f}")


if __name__ == "__main__":
    main()
