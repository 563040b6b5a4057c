"""Bugs of PageRank by hand."""

from __future__ import annotations

import torch

from pdlcheck.checks import check_pagerank
from pdlcheck.checks.graphs import edges

from .entry import entry

# A small web: nodes 0 to 5 link to each other, 6 has no out-link, 7 no in-link.
WEB = edges([0, 0, 1, 2, 2, 3, 4, 4, 5, 7, 7], [1, 2, 2, 0, 3, 4, 5, 6, 3, 0, 4], 8)
# Pages that also link to themselves, or twice to the same page.
LOOPS = edges([0, 0, 1, 1, 2, 3, 3], [0, 1, 1, 2, 3, 0, 1], 4)
REPEATED = edges([0, 0, 0, 1, 2, 2, 3, 3], [1, 1, 2, 2, 0, 3, 0, 0], 4)


def tensors(graph):
    return torch.from_numpy(graph.src), torch.from_numpy(graph.dst), graph.num_nodes


def adjacency_lists(graph):
    lists = [[] for _ in range(graph.num_nodes)]
    for u, v in zip(graph.src.tolist(), graph.dst.tolist(), strict=True):
        lists[u].append(v)
    return lists


def out_degrees(src, n):
    return torch.bincount(src, minlength=n).double()


def power_iteration(src, dst, n, degree, *, damping=0.85, tol=1e-10, max_iter=1000):
    """Iterate until a round moves the ranks by less than ``tol``; ``degree`` divides the rank of each source."""
    rank = torch.full((n,), 1 / n, dtype=torch.float64)
    dangling = degree == 0
    for _ in range(max_iter):
        share = torch.where(dangling, 0.0, rank / degree.clamp(min=1))
        received = torch.zeros(n, dtype=torch.float64).index_add_(0, dst, share[src])
        previous, rank = rank, (1 - damping) / n + damping * (received + rank[dangling].sum() / n)
        if (rank - previous).abs().sum() < tol:
            break
    return rank


@entry(
    "pr-dangling-dropped",
    "cassovary PR #187; TheAlgorithms/Python #14885; NetworKit PR #810",
    check="check_pagerank",
    cause="dangling mass dropped",
)
def drops_the_rank_of_dangling_nodes(broken, world):
    """Nodes without out-links pass their rank to no node."""

    def page_rank(graph, damping=0.85, limit=300):
        lists, n = adjacency_lists(graph), graph.num_nodes
        rank = [1 / n] * n
        for _ in range(limit):
            after = [(1 - damping) / n] * n
            for u, targets in enumerate(lists):
                for v in targets:
                    after[v] += damping * rank[u] / len(targets)
            if not broken:
                lost = sum(rank[u] for u in range(n) if not lists[u])
                after = [value + damping * lost / n for value in after]
            rank = after
        return torch.tensor(rank, dtype=torch.float64)

    check_pagerank(page_rank, WEB)


@entry("pr-init-not-distribution", "TheAlgorithms/Python #14885", check="check_pagerank", cause="ranks start at 1")
def starts_every_rank_at_one(broken, world):
    """Ranks start at 1, and each node gets 1 - d, so they sum to the number of nodes."""

    def page_rank(graph, d=0.85, limit=300):
        src, dst, n = tensors(graph)
        degree = out_degrees(src, n)
        start = 1.0 if broken else 1 / n
        ranks = torch.full((n,), start, dtype=torch.float64)
        for _ in range(limit):
            received = torch.zeros(n, dtype=torch.float64).index_add_(0, dst, (ranks / degree.clamp(min=1))[src])
            ranks = (1 - d) * start + d * (received + ranks[degree == 0].sum() / n)
        return ranks

    check_pagerank(page_rank, WEB)


@entry(
    "pr-wrong-n",
    "gephi #1706",
    check="check_pagerank",
    cause="each connected component solved alone, divided by its own number of nodes",
)
def teleports_within_the_component(broken, world):
    """Each component is ranked with (1 - d) over its own number of nodes."""
    components = edges([0, 1, 1, 2, 3, 4, 4], [1, 0, 2, 0, 4, 3, 3], 5)  # nodes 0 to 2, and 3 and 4

    def calculate_pagerank(graph, damping=0.85, rounds=300):
        src, dst, n = tensors(graph)
        degree, component = out_degrees(src, n), torch.arange(n)
        for _ in range(n):
            component[dst] = component[src] = torch.minimum(component[src], component[dst])
        size = torch.bincount(component, minlength=n)[component]
        nodes = size.double() if broken else torch.full((n,), float(n), dtype=torch.float64)
        rank = torch.full((n,), 1 / n, dtype=torch.float64)
        for _ in range(rounds):
            rank = (1 - damping) / nodes + damping * torch.zeros_like(rank).index_add_(0, dst, (rank / degree)[src])
        return rank

    check_pagerank(calculate_pagerank, components)


@entry(
    "pr-isolated-node",
    "gephi #2191",
    check="check_pagerank",
    cause="isolated nodes get no dangling mass",
)
def gives_an_isolated_node_the_teleport_term_alone(broken, world):
    """Nodes without edges skip the update, and hold 1 - d over n."""
    graph = edges([0, 1, 1, 2], [1, 0, 2, 0], 5)  # nodes 3 and 4 have no edges

    def calculate_pagerank(graph, damping=0.85, rounds=300):
        src, dst, n = tensors(graph)
        degree = out_degrees(src, n)
        isolated = torch.bincount(torch.cat([src, dst]), minlength=n) == 0
        rank = torch.full((n,), 1 / n, dtype=torch.float64)
        for _ in range(rounds):
            received = torch.zeros_like(rank).index_add_(0, dst, (rank / degree.clamp(min=1))[src])
            received += rank[degree == 0].sum() / n
            rank = (1 - damping) / n + damping * received
            if broken:
                rank[isolated] = (1 - damping) / n
        return rank

    check_pagerank(calculate_pagerank, graph)


@entry(
    "pr-max-iter-no-convergence",
    "TheAlgorithms/Python #14885; cugraph #2950",
    check="check_pagerank",
    cause="stopped too early: .* after 3 rounds",
)
def stops_after_three_rounds(broken, world):
    """Three rounds are taken, without a look at the distance between the last two."""

    def page_rank(graph, limit=3):
        src, dst, n = tensors(graph)
        return power_iteration(src, dst, n, out_degrees(src, n), max_iter=limit if broken else 1000)

    check_pagerank(page_rank, WEB)


@entry("pr-duplicate-edges", "class of adjacency sets", check="check_pagerank", cause="collapsed in the sum")
def keeps_out_links_in_a_set(broken, world):
    """Repeated edges count in the out-degree, but the links are a set."""

    def page_rank(graph):
        src, dst, n = tensors(graph)
        degree = out_degrees(src, n)
        if broken:
            src, dst = torch.stack([src, dst]).unique(dim=1)
        return power_iteration(src, dst, n, degree)

    check_pagerank(page_rank, REPEATED)


@entry(
    "pr-transposed",
    "class of adjacency matrices",
    check="check_pagerank",
    cause="matrix transposed, the ranks of the reversed",
)
def multiplies_by_the_matrix_of_the_reversed_graph(broken, world):
    """Ranks follow the rows of the adjacency matrix against the direction of the edges."""

    def page_rank(graph, damping=0.85, rounds=300):
        src, dst, n = tensors(graph)
        adjacency = torch.zeros(n, n, dtype=torch.float64)
        adjacency.index_put_((src, dst), torch.ones(len(src), dtype=torch.float64), accumulate=True)
        if broken:
            adjacency = adjacency.T
        degree = adjacency.sum(1)
        transition = torch.where(degree[:, None] > 0, adjacency / degree.clamp(min=1)[:, None], 1 / n)
        rank = torch.full((n,), 1 / n, dtype=torch.float64)
        for _ in range(rounds):
            rank = (1 - damping) / n + damping * transition.T @ rank
        return rank

    check_pagerank(page_rank, WEB)


@entry("pr-self-loop", "class of edge loops", check="check_pagerank", cause="self-loops left out of the sum")
def skips_self_loops_in_the_sum(broken, world):
    """Links of a page to itself count in its out-degree, but are skipped in the sum."""

    def page_rank(graph):
        src, dst, n = tensors(graph)
        degree = out_degrees(src, n)
        if broken:
            src, dst = src[src != dst], dst[src != dst]
        return power_iteration(src, dst, n, degree)

    check_pagerank(page_rank, LOOPS)


@entry(
    "pr-float32-accumulate",
    "class of float32 sums",
    check="check_pagerank",
    cause="a running sum in float32 over 66667 dangling nodes",
)
def adds_up_dangling_mass_in_float32(broken, world):
    """One running float32 sum over the dangling nodes loses a part of their rank."""
    n = 100_000
    children = torch.arange(1, n)  # a crawl: each page links to three, and the last ones are not yet visited
    graph = edges(((children - 1) // 3).numpy(), children.numpy(), n)

    def page_rank(graph, damping=0.85, rounds=40):
        src, dst, n = tensors(graph)
        degree = out_degrees(src, n)
        dangling, where = degree == 0, torch.zeros(int((degree == 0).sum()), dtype=torch.int64)
        rank = torch.full((n,), 1 / n, dtype=torch.float32 if broken else torch.float64)
        for _ in range(rounds):
            share = torch.where(dangling, 0.0, rank / degree.clamp(min=1)).to(rank.dtype)
            received = torch.zeros_like(rank).index_add_(0, dst, share[src])
            lost = torch.zeros(1, dtype=rank.dtype).index_add_(0, where, rank[dangling])  # one after the other
            rank = (1 - damping) / n + damping * (received + lost / n)
        return rank

    check_pagerank(page_rank, graph)
