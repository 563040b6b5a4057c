"""The checks of PageRank over ranks reject broken ones, name the cause, and accept the correct twin."""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pdlcheck.checks import check_halo_bytes, check_pagerank_over_ranks, check_pagerank_rounds
from pdlcheck.checks.graphs import edges, scattered
from pdlcheck.checks.pagerank.oracle import Oracle
from pdlcheck.errors import BufferHazard, Deadlock, Inconclusive, Unsupported
from pdlcheck.worlds import get_world

D = 0.85
PARTS = scattered(edges([0, 0, 1, 2, 3, 3, 5, 5, 5], [1, 3, 2, 0, 0, 2, 1, 1, 3], 6), [0, 0, 1, 1, 2, 2, 0, 1, 2], 3)
WEIGHTED = scattered(edges([0, 0, 1, 2, 3, 3], [1, 3, 2, 0, 0, 2], 6, [1, 3, 1, 1, 0, 2]), [0, 0, 1, 1, 2, 2], 3)


def exchanged(values, needed, *, size, wait=True):
    """Exchange values by one all_to_all, and return a vector of those that arrived.

    ``needed[p][q]`` holds the nodes of rank p that rank q reads.
    """
    here, everyone = dist.get_rank(), range(dist.get_world_size())
    sent = torch.from_numpy(np.concatenate([values[needed[here][q]] for q in everyone]))
    taken = [len(needed[p][here]) for p in everyone]
    room = torch.zeros(sum(taken), dtype=torch.float64)
    splits = [len(needed[here][q]) for q in everyone]
    work = dist.all_to_all_single(room, sent, taken, splits, async_op=True)
    if wait:
        work.wait()
    arrived = np.zeros(size)
    arrived[np.concatenate([needed[p][here] for p in everyone])] = room.numpy().copy()
    work.wait()
    return arrived


def summed(numbers):
    """Return the sums of a few numbers over ranks, added in one order on every rank."""
    own = torch.tensor(numbers, dtype=torch.float64)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return torch.stack(everyone).sum(0).tolist()


def twin(part, *, max_iter=200, tol=1e-11, bug=None):
    """Rank by a correct PageRank over ranks in plain numpy, or with the mistake ``bug``.

    Each rank sees every edge.
    """
    everyone, here, world_size = [None] * dist.get_world_size(), dist.get_rank(), dist.get_world_size()
    dist.all_gather_object(everyone, part)
    n = part.num_nodes
    src, dst = (np.concatenate([getattr(p, name) for p in everyone]) for name in ("src", "dst"))
    weights = np.concatenate([np.ones(len(p.src)) if p.weights is None else p.weights for p in everyone])
    ranges = np.array_split(np.arange(n), world_size)
    owner = np.concatenate([np.full(len(ids), rank) for rank, ids in enumerate(ranges)])
    mine = owner == here
    out = np.bincount(src, weights, n)
    if bug == "out-weights of the edges that enter own nodes":
        out = np.bincount(src[mine[dst]], weights[mine[dst]], n)
    out = np.divide(1.0, out, out=np.zeros(n), where=out > 0)
    live = weights > 0 if bug != "edges of weight 0 are exchanged" else weights >= 0

    def reads(p, q):
        found = src[live & (owner[src] == p) & (owner[dst] == q)] if p != q else src[:0]
        if bug == "a value for each edge":
            return np.sort(found)
        if bug == "whole shards":
            return ranges[p] if p != q else found
        found = np.unique(found)
        return found[1:] if bug == "an entry is missing" and (p, q) == (0, 1) else found

    needed = [[reads(p, q) for q in range(world_size)] for p in range(world_size)]
    x = np.where(mine, 1 / n, 0)
    before, first_halo, last_halo, bound, iterations = x, None, None, np.inf, 0
    while iterations < max_iter:
        iterations += 1
        halo = exchanged(x, needed, size=n, wait=bug != "read before it has arrived")
        if bug == "a vector gathered":
            full = [torch.empty(n, dtype=torch.float64) for _ in range(world_size)]
            dist.all_gather(full, torch.from_numpy(np.where(mine, x, 0)))
        first_halo = halo if first_halo is None else first_halo
        late = halo if last_halo is None else last_halo
        last_halo = halo
        halo = {"the halo of the first round": first_halo, "the halo of the round before": late}.get(bug, halo)
        own = np.where(mine, x, 0)
        mass = own[(out == 0) & mine].sum()
        if bug != "dangling mass of own nodes alone":
            mass = summed([mass])[0]
        if bug == "dangling mass of the round before":
            mass = summed([before[(out == 0) & mine].sum()])[0]
        arrived = np.bincount(dst, weights * ((own + halo) * out)[src], n)
        new = np.where(mine, (1 - D) / n + D * (arrived + mass / n), 0)
        own_step = np.abs(new - own).sum()
        step = summed([own_step])[0]
        if bug == "decides alone":
            step = own_step
        before, x = own, new
        bound = D * step / (1 - D) + 1e-14
        if bound <= tol:
            break
    if bug == "the scores of one round earlier" and here == 1:
        x = before
    if bug == "another count":
        iterations += here
    if bug == "bound of own step":
        bound = D * own_step / (1 - D)
    nodes = ranges[here]
    if bug == "a node twice" and here == 0:
        nodes = np.append(nodes, ranges[1][0])
    if bug == "a node nowhere" and here == 2:
        nodes = nodes[:-1]
    if bug == "other bits on rank 2":
        scores = np.array(summed(list(x)))
        return scores + (1e-16 if here == 2 else 0) * np.arange(n)
    bound = float(bound)
    if bug == "a bound far too small":
        bound, tol = bound / 1000, tol / 1000
    return SimpleNamespace(
        nodes=nodes, scores=x[nodes], iterations=iterations, error_bound=bound, converged=bound <= tol
    )


SCORES = {
    "an entry is missing": (
        r"rank 0 holds \S+ for node 0, the dense solution is 0.323",
        r"in edges +2 \(rank 1\) -> 0, 3 \(rank 1\) -> 0",
        r"likely cause +the score of node 0 \(rank 0\) never reaches rank 1: the scores are exactly those",
    ),
    "dangling mass of own nodes alone": (r"likely cause +the dangling mass of other ranks is left out",),
    "the halo of the first round": ("scores of other ranks are those of the first round, never sent again",),
    "out-weights of the edges that enter own nodes": ("the sum grows round by round: not divided by the out-weight",),
    "another count": (
        r"iterations is \d+ on rank 1, \d+ on rank 0",
        "a rank decides by numbers of its own when to stop, not by those of all ranks",
    ),
    "bound of own step": (r"error_bound is \S+ on rank [12], \S+ on rank 0",),
    "a bound far too small": (r"twin: error_bound is \S+, the true L1 error is",),
    "a node twice": ("node 2 is in the shards of ranks 0 and 1",),
    "a node nowhere": ("node 5 is in no shard, one of 1",),
    "other bits on rank 2": (r"rank 2 holds [.\d]+ for node [1-5], rank 0 [.\d]+\n", "must be sent to all"),
}
ROUNDS = {
    "the scores of one round earlier": ("rank 1 stopped early: its scores are those after 2 of 3 rounds",),
    "the halo of the round before": ("scores of other ranks are those of the round before: they are used one",),
    "dangling mass of the round before": ("the dangling mass is that of the round before: it is used one round late",),
}
BYTES = {
    "a value for each edge": (
        "rank 2 sends rank 0 16 bytes a round, the edges between them need 8",
        r"needed +nodes \[5\] of rank 2, 8 bytes each, once",
        "a value is sent for each edge, not for each distinct source",
    ),
    "whole shards": ("all scores of the rank are sent, needed or not",),
    "an entry is missing": ("rank 0 sends rank 1 8 bytes a round, .* need 16", "values are left out"),
    "edges of weight 0 are exchanged": ("rank 1 sends rank 0 16 bytes a round, the edges between them need 8",),
    "a vector gathered": (
        "rank 0 sends 128 bytes a round in other operations .*, 2 numbers to all others are 64",
        "whole vectors are gathered",
    ),
}


def require_messages(caught, messages, fact):
    text = str(caught.value)
    facts = rf"case +world=sim world_size=3 num_nodes=6 num_edges=\d {fact}", "edges held +rank 0: 0 -> 1, 0 -> 3"
    for message in (*messages, *facts):
        assert re.search(message, text), f"{message!r} is not in\n{text}"


@pytest.mark.parametrize("bug", SCORES)
def test_check_pagerank_over_ranks_rejects(bug):
    world = get_world("sim")
    check_pagerank_over_ranks(twin, PARTS, world, tol=1e-10)
    with pytest.raises(AssertionError) as caught:
        check_pagerank_over_ranks(partial(twin, bug=bug), PARTS, world, tol=1e-10)
    if bug != "a bound far too small":  # this message is check_error_bound's own
        require_messages(caught, SCORES[bug], "damping=0.85")
    assert re.search(SCORES[bug][0], str(caught.value))


@pytest.mark.parametrize("bug", ROUNDS)
def test_check_pagerank_rounds_rejects(bug):
    world = get_world("sim")
    check_pagerank_rounds(twin, PARTS, world)
    with pytest.raises(AssertionError, match="3 serial rounds give") as caught:
        check_pagerank_rounds(partial(twin, bug=bug), PARTS, world)
    require_messages(caught, ROUNDS[bug], "damping=0.85 max_iter=3")


@pytest.mark.parametrize("bug", BYTES)
def test_check_halo_bytes_rejects(bug):
    world, parts = get_world("sim"), WEIGHTED if "weight" in bug else PARTS
    assert check_halo_bytes(twin, PARTS, world, numbers=2) == {(0, 1): 16, (1, 0): 16, (2, 0): 8, (2, 1): 8}
    check_halo_bytes(twin, WEIGHTED, world, numbers=2)
    with pytest.raises(AssertionError) as caught:
        check_halo_bytes(partial(twin, bug=bug), parts, world, numbers=2)
    require_messages(caught, BYTES[bug], "max_iter=2")


def test_scores_read_before_they_have_arrived_are_a_hazard_on_sim():
    with pytest.raises(BufferHazard, match=r"rank . reads the output of a pending operation"):
        check_pagerank_over_ranks(partial(twin, bug="read before it has arrived"), PARTS, get_world("sim"))


def test_a_rank_that_stops_by_its_own_step_leaves_the_others_blocked_and_is_named():
    with pytest.raises(Deadlock, match=r"rank 2 has returned and will not take part: fewer steps, or an early return"):
        check_pagerank_over_ranks(partial(twin, bug="decides alone"), PARTS, get_world("sim"))


def test_what_cannot_be_judged_is_inconclusive_and_a_world_that_counts_nothing_is_refused():
    with pytest.raises(Inconclusive, match=r"twin: rank 0 stopped after \d+ of 150 rounds; call it with a smaller tol"):
        check_pagerank_rounds(twin, PARTS, get_world("sim"), rounds=150)
    huge = [edges([0], [1], 3001)]
    with pytest.raises(Inconclusive, match="3001 nodes are too many"):
        check_pagerank_over_ranks(twin, huge, get_world("sim"))
    with pytest.raises(Unsupported, match="gloo does not count what its ranks send"):
        check_halo_bytes(twin, PARTS, get_world("gloo"))


def test_the_mean_of_what_each_rank_makes_of_its_edges_is_rejected():
    def averaged(part):
        whole = Oracle.of(part, D).solve()
        return np.array(summed(list(whole))) / dist.get_world_size()

    for parts in (PARTS, [*PARTS[:2], edges([], [], 6)]):  # the last rank holds no edge
        with pytest.raises(AssertionError, match="each rank ranks the edges that it holds alone, and the mean is"):
            check_pagerank_over_ranks(averaged, parts, get_world("sim"))


def test_without_edges_a_wrong_score_is_named_too():
    def doubled(part):
        return 2 * np.full(part.num_nodes, 1 / part.num_nodes)

    with pytest.raises(AssertionError, match="every score is 2 times the right one: the scores are not normalised"):
        check_pagerank_over_ranks(doubled, [edges([], [], 4)] * 2, get_world("sim"))


def test_scores_of_the_wrong_shape_are_named():
    def short(part):
        return np.zeros(2)

    with pytest.raises(AssertionError, match=r"short: rank 0 returned scores of shape \(2,\) for 6 nodes"):
        check_pagerank_over_ranks(short, PARTS, get_world("sim"))


WRONG_NODES = {
    "counted from 1": (lambda nodes: nodes + 1, "score for node 6, nodes are 0 to 5\n.*ids are counted from 1"),
    "before the first": (lambda nodes: nodes - 1, "rank 0 has a score for node -1, nodes are 0 to 5"),
    "no ids": (lambda nodes: nodes + 0.5, r"nodes of rank 0 are \[0.5, 1.5\], expected ids"),
    "one twice": (lambda nodes: np.minimum(nodes, nodes[0]), "node 0 is twice in the shard of rank 0"),
}


@pytest.mark.parametrize("kind", WRONG_NODES)
def test_nodes_that_no_graph_has_are_rejected_with_their_rank(kind):
    change, message = WRONG_NODES[kind]

    def moved(part, change=lambda nodes: torch.from_numpy(np.array(nodes))):
        result = twin(part)
        return SimpleNamespace(scores=result.scores, nodes=change(np.array(result.nodes)))

    check_pagerank_over_ranks(moved, PARTS, get_world("sim"))
    with pytest.raises(AssertionError, match=message):
        check_pagerank_over_ranks(partial(moved, change=change), PARTS, get_world("sim"))


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([], ValueError, r"^parts must be one graph for each rank, got \[\]"),
        ([([0], [1])], TypeError, r"^parts\[0\] must have src, dst, num_nodes and weights, got a tuple"),
        ([PARTS[0], edges([0], [1], 2)], ValueError, "^parts must have the num_nodes of the whole graph, got 6"),
    ],
)
def test_parts_of_no_graph_are_refused_before_they_are_ranked(parts, error, message):
    with pytest.raises(error, match=message):
        check_pagerank_over_ranks(twin, parts, get_world("sim"))
