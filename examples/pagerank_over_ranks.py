"""The Debian 12 packages that most others depend on, ranked by several processes that share the edges.

torchrun --standalone --nproc-per-node 4 examples/pagerank_over_ranks.py --top 10
"""

from __future__ import annotations

import argparse

import torch.distributed as dist

from pdlcheck.primitives.pagerank import debian_dependencies, gather_scores, pagerank_over_ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--top", type=int, default=10, help="how many packages; default: %(default)s")
    parser.add_argument("--tol", type=float, default=1e-8, help="largest L1 error; default: %(default)s")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    graph = debian_dependencies()
    mine = slice(rank, None, world_size)  # any partition works if each edge is on exactly one rank
    shard = pagerank_over_ranks((graph.src[mine], graph.dst[mine]), num_nodes=graph.num_nodes, tol=options.tol)
    everyone = [None] * world_size
    dist.all_gather_object(everyone, (len(shard.nodes), shard.num_edges, shard.num_halo_nodes))
    result = gather_scores(shard)
    if rank == 0:
        print(f"{result.iterations} rounds, error below {result.error_bound:.1e}")
        for place, (nodes, edges, halo) in enumerate(everyone):
            print(f"rank {place}: {nodes} packages, {edges} dependencies, reads {halo} scores of other ranks a round")
        for place, (node, score) in enumerate(result.top(options.top), start=1):
            print(f"{place:3}  {graph.names[node]:20} {score:.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
