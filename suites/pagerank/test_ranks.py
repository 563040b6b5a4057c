"""PageRank over ranks: the dense solution for any placement of edges, serial rounds, a minimal halo."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlcheck.checks import check_halo_bytes, check_pagerank, check_pagerank_over_ranks, check_pagerank_rounds
from pdlcheck.checks.graphs import CORNERS, edges, scattered, scattered_graphs
from pdlcheck.checks.rank_results import group_of, possible_order
from pdlcheck.clock import Link, Topology, compute
from pdlcheck.errors import Inconclusive
from pdlcheck.primitives.arguments import members
from pdlcheck.primitives.pagerank import Graph, debian_dependencies, gather_scores, pagerank
from pdlcheck.primitives.pagerank.datasets import rmat
from pdlcheck.primitives.pagerank.ranks.part import Part, make_part
from pdlcheck.primitives.pagerank.ranks.partition import balanced_cuts, owners, partition_nodes
from pdlcheck.primitives.pagerank.ranks.rows import Rows, csr
from pdlcheck.primitives.pagerank.ranks.solve import iterate
from pdlcheck.worlds import get_world

pytestmark = pytest.mark.verifies("pagerank_over_ranks")

few = settings(max_examples=10)
DAMPING = st.sampled_from([0.85, 0.0, 0.3, 0.95])
TRIANGLE = Graph.from_edges([0, 1, 2], [1, 2, 0], 3)
TINY = 1e-300  # never reached: the number of rounds is max_iter


def drawn_parts(**keywords):
    return scattered_graphs(Graph.from_edges, **keywords)


def dealt(graph, world_size):
    """Place edge ``e`` on rank ``e % world_size``."""
    return scattered(graph, np.arange(len(graph.src)) % world_size, world_size, Graph.from_edges)


def power_law(num_nodes, num_edges, seed=0):
    """Return a graph in which most edges enter nodes with small ids."""
    draws = np.random.default_rng(seed)
    src, dst = draws.integers(0, num_nodes, num_edges), (num_nodes * draws.random(num_edges) ** 4).astype(np.int64)
    return edges(src, dst, num_nodes)


# ---- the right scores


@pytest.mark.parametrize("corner", CORNERS)
def test_scores_of_a_named_graph_are_the_dense_solution(subject, world, corner):
    check_pagerank_over_ranks(subject, dealt(CORNERS[corner], 3), world)


@pytest.mark.parametrize("vector", ["personalization", "dangling", "start"])
def test_a_vector_given_by_id_means_the_same_over_ranks(subject, world, vector):
    given, dense = {vector: {1: 3.0, 2: 1.0}}, {} if vector == "start" else {vector: [0, 3, 1, 0]}
    parts = dealt(edges([0, 0, 1, 2], [1, 3, 2, 0], 4), 2)
    check_pagerank_over_ranks(partial(subject, **given), parts, world, **dense)
    one = partial(subject, **given, max_iter=1)
    check_pagerank_over_ranks(one, parts, world, tol=None, **dense)


@pytest.mark.if_subject_takes("start")
@pytest.mark.schedules(20)
@pytest.mark.parametrize("semantics", ["rendezvous", "buffered", "gloo", "nccl"])
def test_the_scores_do_not_depend_on_the_schedule(subject, world, semantics):
    if world.name == "sim":
        world = get_world("sim", seed=world.seed, schedule=world.schedule, semantics=semantics)
    elif semantics != "rendezvous":
        pytest.skip("semantics are of the simulated network: --world sim")
    check_pagerank_rounds(partial(subject, tol=TINY, start=np.ones(12)), dealt(power_law(12, 40), 3), world)


@pytest.mark.if_subject_takes("replicated")
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_scores_of_a_real_graph_are_those_of_one_process(subject, world, world_size):
    graph = debian_dependencies()

    def gathered():
        shard = subject(graph, replicated=True, tol=1e-10)
        return gather_scores(shard), shard.num_edges

    results = world.run(gathered, world_size=world_size)
    result, alone = results[0][0], pagerank(graph, tol=1e-10)
    assert result.converged
    assert np.abs(result.scores - alone.scores).sum() <= result.error_bound + alone.error_bound
    assert result.top(3) == [(name, pytest.approx(score)) for name, score in alone.top(3)]
    assert sum(num_edges for _, num_edges in results) == graph.num_edges


def test_a_hub_of_many_edges_is_the_fixed_point(subject, world):
    graph = power_law(5000, 40_000)

    def whole(part):
        return gather_scores(subject(part, tol=1e-11))

    scores = world.run(lambda parts: whole(parts[dist.get_rank()]).scores, dealt(graph, 4), world_size=4)
    check_pagerank(lambda graph: scores[3], graph, tol=1e-11)


@pytest.mark.beyond_contract("error messages")
@pytest.mark.world_size(4)
def test_it_works_in_a_group_of_some_ranks_in_any_order(subject, rank):
    ranks = possible_order([3, 1, 2])
    group = group_of(ranks)
    if rank == 0:
        with pytest.raises(ValueError, match="pagerank_over_ranks was called on rank 0, which is outside the group"):
            subject(TRIANGLE, group=group)
        return
    place = ranks.index(rank)
    shard = subject(([place], [(place + 1) % 3], [place + 1.0]), num_nodes=3, group=group)
    assert shard.nodes == range(place, place + 1)
    assert gather_scores(shard, group).scores == pytest.approx([1 / 3] * 3)


@pytest.mark.world_size(2)
def test_weights_on_one_rank_alone_count(subject, rank):
    mine = ([0, 1], [1, 0], [3.0, 1.0]) if rank else ([0], [2])
    result = gather_scores(subject(mine))
    alone = pagerank(([0, 1, 0], [1, 0, 2], [3.0, 1.0, 1.0]), tol=1e-12)
    assert result.scores == pytest.approx(alone.scores, abs=1e-8)


def test_out_weights_whose_sum_overflows_are_shared_out(subject, world):
    graph = edges([0, 0, 0, 1, 2], [1, 1, 2, 0, 1], 3, [1.5e308, 1.5e308, 1.5e308, 1e-320, 2.0])
    check_pagerank_over_ranks(subject, dealt(graph, 2), world)


@pytest.mark.if_subject_takes("start")
@pytest.mark.world_size(2)
def test_the_scores_themselves_are_a_start_that_takes_two_rounds(subject, rank):
    mine = ([0, 0], [1, 2]) if rank else ([1, 2], [2, 0])
    found = gather_scores(subject(mine, num_nodes=4, tol=1e-12))
    assert subject(mine, num_nodes=4, start=found.scores).iterations <= 2 < found.iterations


@pytest.mark.world_size(3)
def test_the_number_of_nodes_is_that_of_the_largest_id_of_any_rank(subject, rank):
    shard = subject(([rank], [2 * rank]))
    assert shard.cuts[-1] == 5


# ---- messages and the division of work


def test_the_halo_that_a_shard_names_is_what_arrives(subject):
    world, parts = get_world("sim"), dealt(power_law(60, 300), 4)
    cut = check_halo_bytes(partial(subject, tol=TINY), parts, world)
    shards = world.run(lambda: subject(parts[dist.get_rank()]), world_size=4)
    for rank, shard in enumerate(shards):
        assert 8 * shard.num_halo_nodes == sum(nbytes for (_, dst), nbytes in cut.items() if dst == rank)


class SlowPart(Part):
    """A part whose local sums take two virtual seconds."""

    def add_local(self, values):
        compute(2.0)
        return super().add_local(values)


def test_the_exchange_goes_on_while_a_rank_sums_what_its_own_nodes_send():
    """A link takes one second for the halo and one for the numbers, so a round takes 2 s, not 4."""
    world = get_world("sim", topology=Topology(intra=Link(latency_s=1.0)))

    def program(rounds):
        src, dst, who = np.array([0, 1]), np.array([1, 0]), members("test", None)
        part = make_part(src, dst, None, partition_nodes(dst, 2, who), who)
        vectors = {"personalization": None, "dangling": None, "start": None}
        iterate(SlowPart(**vars(part)), vectors, damping=0.85, tol=TINY, max_iter=rounds)

    seconds = []
    for rounds in (1, 2):
        world.run(program, rounds, world_size=2)
        seconds.append(world.timeline.step_time_s)
    assert seconds[1] - seconds[0] == 2


def test_work_is_balanced_where_most_edges_enter_few_nodes(subject, world):
    graph = power_law(2000, 20_000)
    shards = world.run(lambda parts: subject(parts[dist.get_rank()]), dealt(graph, 4), world_size=4)
    work = [shard.num_edges + 4 * len(shard.nodes) for shard in shards]
    largest = np.bincount(graph.dst).max() + 4
    assert max(work) <= sum(work) / 4 + largest
    assert len(shards[0].nodes) * 3 < len(shards[3].nodes)  # equal ranges would hold very different amounts of work


def test_more_nodes_than_buckets_are_all_ranked(subject, world):
    n = 200_001
    shards = world.run(lambda: subject(([dist.get_rank()], [n - 1]), num_nodes=n), world_size=2)
    assert [shard.nodes.stop for shard in shards][-1] == n
    assert sum(shard.scores.sum() for shard in shards) == pytest.approx(1)


# ---- bad input


class OutOfMemory:
    @property
    def edge_index(self):
        raise MemoryError("no room for the rows")


class Failing:
    @property
    def edge_index(self):
        raise KeyError("edge_index")


BAD = {
    "an id beyond num_nodes": (
        {"graph": ([0], [7]), "num_nodes": 3},
        r"dst holds 7 at 0, ids must be in \[0, 3\); .* \(on rank 1\)",
    ),
    "a negative id": ({"graph": ([-1], [0]), "num_nodes": 3}, r"src holds -1 at 0, .* \(on rank 1\)"),
    "NaN for a weight": ({"graph": ([0], [1], [np.nan]), "num_nodes": 3}, r"weights holds nan at 0; .* \(on rank 1\)"),
    "another num_nodes": ({"num_nodes": 4}, "same num_nodes on every rank, got 3 on rank 0 and 4 on rank 1"),
    "damping": ({"damping": 1.5}, r"damping must be in \[0, 1\), got 1.5; the usual value is 0.85 \(on rank 1\)"),
    "another damping": ({"damping": 0.5}, "same damping on every rank, got 0.85 on rank 0 and 0.5 on rank 1"),
    "another tol": ({"tol": 1e-3}, "same tol on every rank, got 1e-08 on rank 0 and 0.001 on rank 1"),
    "tol 0": ({"tol": 0}, r"tol must be a positive number, .*, got 0; 1e-8 is usual \(on rank 1\)"),
    "another max_iter": ({"max_iter": 3}, "same max_iter on every rank, got inf on rank 0 and 3 on rank 1"),
    "max_iter 0": ({"max_iter": 0}, r"max_iter must be 1 or more, got 0 \(on rank 1\)"),
    "replicated on one rank": ({"replicated": True}, "same replicated on every rank, got False on rank 0 and True"),
    "another personalization": (
        {"personalization": [1, 0, 0]},
        "same personalization on every rank, got None on rank 0 and digest [0-9a-f]+ on rank 1",
    ),
    "a short start": ({"start": [1, 1]}, r"start must be one number per node, shape \(3,\), .* \(on rank 1\)"),
    "no dangling mass lands": ({"dangling": [0, 0, 0]}, r"dangling is 0 everywhere; .* \(on rank 1\)"),
    "ids that are no integers": ({"graph": ([0.5], [1])}, r"src must hold integers, got dtype float64; .* \(on rank 1"),
    "a tensor without numbers": (
        {"graph": torch.empty(2, 3, dtype=torch.int64, device="meta")},
        r"NotImplementedError: Cannot copy out of meta tensor; .* \(on rank 1\)",
    ),
    "a library that is out of memory": ({"graph": OutOfMemory()}, r"^no room for the rows \(on rank 1\)"),
    "an attribute that fails": ({"graph": Failing()}, r"KeyError: 'edge_index' \(on rank 1\)"),
    "more nodes than ids": ({"num_nodes": 2**63 + 1}, r"num_nodes must be at most 2\*\*63, .* \(on rank 1\)"),
    "no graph at all": ({"graph": "edges.txt"}, r"graph: cannot read a builtins.str; .* \(on rank 1\)"),
}


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize("case", BAD)
@pytest.mark.world_size(3)
def test_what_one_rank_was_given_wrong_is_the_same_error_on_all(subject, rank, case):
    arguments, message = BAD[case]
    given = {"graph": ([0, 1], [1, 2]), "num_nodes": 3, **(arguments if rank == 1 else {})}
    with pytest.raises((TypeError, ValueError, MemoryError, RuntimeError), match=message) as caught:
        subject(**given)
    everyone = [None] * 3
    dist.all_gather_object(everyone, str(caught.value))
    assert len(set(everyone)) == 1
    assert subject(([0], [1]), num_nodes=3).converged  # the failed call left nothing behind


@pytest.mark.beyond_contract("error messages")
@pytest.mark.world_size(2)
def test_graphs_that_are_not_the_same_on_every_rank_are_no_replicas(subject, rank):
    with pytest.raises(ValueError, match=r"same edges on every rank, got 1 with digest .* on rank 0 and 1 with"):
        subject(([rank], [0]), num_nodes=2, replicated=True)


@pytest.mark.beyond_contract("error messages")
@pytest.mark.world_size(2)
def test_nodes_that_have_other_names_on_other_ranks_are_refused(subject, rank):
    names = ("a", "b") if rank else ("b", "a")
    with pytest.raises(ValueError, match="same names of the nodes on every rank"):
        subject(Graph([0], [1], 2, names=names))


@pytest.mark.world_size(2)
def test_names_stay_with_the_nodes(subject):
    shard = subject(Graph([0], [1], 2, names=("a", "b")), personalization={"a": 1})
    assert gather_scores(shard).top(1)[0][0] == "a"


@pytest.mark.beyond_contract("error messages")
@pytest.mark.world_size(2)
def test_the_shard_of_another_rank_is_not_gathered(subject, rank):
    shard = subject(TRIANGLE)
    others = [None, None]
    dist.all_gather_object(others, shard)
    with pytest.raises(ValueError, match=r"gather_scores got a shard of 2 ranks with range.* on place 0 of 2"):
        gather_scores(others[1 - rank])


@pytest.mark.beyond_contract("error messages")
@pytest.mark.world_size(2)
def test_a_shard_that_one_rank_alone_mistakes_leaves_nobody_waiting(subject, rank):
    shard, other = subject(TRIANGLE), subject(([0], [1]), num_nodes=9)
    with pytest.raises(ValueError, match=r"same ranges of nodes on every rank, got \(0, .* on rank 0 and .* on rank 1"):
        gather_scores(other if rank else shard)
    wide = replace(shard, nodes=range(9))
    with pytest.raises(ValueError, match=r"gather_scores got a shard of 2 ranks with range\(0, 9\) on place 1 of 2"):
        gather_scores(wide if rank else shard)


@pytest.mark.world_size(3)
def test_ids_are_counted_by_the_rank_that_has_them(subject, world_size):
    """A bucket may hold several nodes, and the last bucket fewer."""
    num_nodes = 4 * 2**16 - 1
    ids = np.random.default_rng(1).integers(0, num_nodes, 1000)
    ids[:300] = num_nodes - 1
    partition = partition_nodes(ids, num_nodes, members("test", None))
    expected = np.bincount(owners(ids, partition.cuts), minlength=world_size)
    assert partition.counts(ids).tolist() == expected.tolist()
    assert partition.num_in_edges.tolist() == (3 * expected).tolist()


HUGE = 10**13  # number of nodes


@pytest.mark.beyond_contract("error messages")
@pytest.mark.world_size(2)
def test_parts_that_cannot_fit_are_refused_on_every_rank_before_a_vector_is_made(subject):
    message = r"pagerank_over_ranks of 10000000000000 nodes and 2 edges needs 1\d{6}\.\d GiB for 2 ranks on .* are free"
    with pytest.raises(MemoryError, match=message):
        subject(([0], [1]), num_nodes=HUGE)
    with pytest.raises(MemoryError, match=r"needs 2\d{6}\.\d GiB for 2 ranks"):
        subject(([0], [1]), num_nodes=HUGE, personalization={0: 1.0}, start={1: 1.0})
    assert subject(([0], [1]), num_nodes=3).converged


@pytest.mark.beyond_contract("error messages")
@pytest.mark.world_size(2)
def test_scores_that_no_rank_can_hold_are_not_gathered(subject, rank):
    cuts = (0, HUGE // 2, HUGE)
    shard = replace(subject(TRIANGLE), cuts=cuts, nodes=range(*cuts[rank : rank + 2]))
    with pytest.raises(MemoryError, match=r"gather_scores of 10000000000000 nodes needs .* GiB for 2 ranks on .*; let"):
        gather_scores(shard)


@pytest.mark.beyond_contract("error messages")
def test_without_a_process_group_the_error_says_what_to_call(subject):
    with pytest.raises(ValueError, match=r"pagerank_over_ranks needs a process group; call torch.distributed.init"):
        subject(TRIANGLE)


# ---- parts


@pytest.mark.parametrize("weighted", [False, True])
def test_rows_as_torch_has_them_sum_as_the_loop_does(weighted):
    begins, sources = np.array([0, 3, 3, 5]), np.array([1, 1, 0, 3, 1], np.int32)
    weights = np.array([0.5, 0.25, 1, 1, 0.125]) if weighted else None
    values, sums = torch.tensor([1.0, 2, 4, 8], dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    Rows(np.repeat(range(3), np.diff(begins)), sources.astype(np.int64), weights, 3, 4, torch.device("cpu")).add(
        values, sums
    )
    assert sums.tolist() == ([3.5, 1, 9.25] if weighted else [6, 1, 11])
    assert (1 + csr(begins, sources, weights, 4) @ values).tolist() == sums.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_on_a_gpu_sum_as_on_the_cpu(weighted):
    graph = power_law(200, 2000)
    weights = np.arange(1.0, 2001.0) if weighted else None
    values = torch.linspace(0, 1, 200, dtype=torch.float64)
    sums = []
    for device in ("cpu", "cuda"):
        sums.append(torch.zeros(200, dtype=torch.float64, device=device))
        Rows(graph.dst, graph.src, weights, 200, 200, torch.device(device)).add(values.to(device), sums[-1])
    assert torch.allclose(sums[0], sums[1].cpu(), rtol=1e-13, atol=0)


# ---- drawn graphs, and loads


@few
@given(parts=drawn_parts(), damping=DAMPING, tol=st.sampled_from([1e-3, 1e-8, 1e-12, 1e-17]))
def test_scores_over_ranks_are_the_dense_solution(subject, world, parts, damping, tol):
    check_pagerank_over_ranks(partial(subject, damping=damping, tol=tol), parts, world, damping=damping, tol=tol)


@pytest.mark.if_subject_takes("start")
@few
@given(parts=drawn_parts(max_nodes=5), data=st.data())
def test_teleport_dangling_and_start_vectors_mean_the_same_over_ranks(subject, world, parts, data):
    n = parts[0].num_nodes
    vector = st.none() | st.lists(st.integers(0, 4), min_size=n, max_size=n).filter(lambda v: any(v) or not v)
    given = {"personalization": data.draw(vector), "dangling": data.draw(vector)}
    subject = partial(subject, **given, start=data.draw(vector))
    check_pagerank_over_ranks(subject, parts, world, **given)


@few
@given(parts=drawn_parts(), rounds=st.integers(1, 6))
def test_the_error_bound_holds_when_max_iter_stops_it(subject, world, parts, rounds):
    check_pagerank_over_ranks(partial(subject, max_iter=rounds), parts, world, tol=None)


@pytest.mark.if_subject_takes("start")
@few
@given(parts=drawn_parts(), damping=DAMPING, rounds=st.integers(1, 4))
def test_rounds_over_ranks_are_serial_rounds(subject, world, parts, damping, rounds):
    n = parts[0].num_nodes
    subject = partial(subject, tol=TINY, damping=damping, start=np.ones(n) if n else None)
    try:
        check_pagerank_rounds(subject, parts, world, rounds=rounds, damping=damping)
    except Inconclusive:  # the rounds reached the fixed point to the last bit
        check_pagerank_rounds(subject, parts, world, rounds=1, damping=damping)


@pytest.mark.if_subject_takes("replicated", "start")
@pytest.mark.parametrize("world_size", [1, 3])
def test_it_begins_nearer_to_the_ranks_than_the_teleport_vector(subject, world, world_size):
    graph = rmat(10, 15_000)
    start = np.ones(graph.num_nodes)
    default, from_v = world.run(
        lambda: [gather_scores(subject(graph, replicated=True, tol=1e-6, start=v)) for v in (None, start)],
        world_size=world_size,
    )[0]
    assert default.converged
    assert default.iterations + 2 <= from_v.iterations
    assert np.abs(default.scores - from_v.scores).sum() < 2e-6


@few
@given(parts=drawn_parts())
def test_gathered_scores_are_the_same_on_every_rank(subject, world, parts):
    def gathered(part):
        return gather_scores(subject(part))

    check_pagerank_over_ranks(gathered, parts, world)


@given(parts=drawn_parts(max_nodes=12, max_edges=30))
def test_a_round_sends_each_value_that_another_rank_needs_once_and_nothing_else(subject, parts):
    check_halo_bytes(partial(subject, tol=TINY), parts, get_world("sim"))


@given(load=st.lists(st.integers(0, 50), max_size=30), parts=st.integers(1, 8))
def test_no_range_is_heavier_than_its_share_and_one_node(load, parts):
    cuts = balanced_cuts(np.array(load, np.int64), parts).tolist()
    assert cuts[0] == 0
    assert cuts[-1] == len(load)
    heaviest = max(sum(load[first:last]) for first, last in pairwise(cuts))
    assert heaviest <= sum(load) / parts + max(load, default=0)


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize("largest", [2**40, 2**56, 2**61, 2**62, 2**63 - 1])
@pytest.mark.world_size(3)
def test_an_id_that_no_memory_has_room_for_is_refused_on_every_rank(subject, rank, largest):
    with pytest.raises(MemoryError, match=rf"pagerank_over_ranks of {largest + 1} nodes .*needs \d+\.\d GiB"):
        subject(([largest], [0]) if rank == 1 else ([0], [1]))
