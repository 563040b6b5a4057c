"""The world ``ray``: ranks are forked by actors of a cluster with two nodes, both on this machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("ray", reason="these tests need Ray: pip install 'pdlcheck[ray]'")

TESTS = '''
import os, signal, time
import pytest, ray, torch, torch.distributed as dist
from pdlcheck.worlds import get_world
from pdlcheck.errors import RankDied, WorldTooSmall

@pytest.mark.world_size(2)
def test_sum(rank):
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x)
    assert x.item() == 3

@pytest.mark.world_size(2)
def test_wrong_on_rank_1(rank):
    assert rank == 0

@pytest.fixture
def world():
    made = get_world("ray", timeout_s=60)
    yield made
    made.close()

def node():
    """Return the Ray node of the actor that has forked this rank."""
    return os.environ["RAY_NODE_ID"]

def test_ranks_are_actors_on_both_nodes(world):
    world.run(dist.get_rank, world_size=2)
    places = ray.util.placement_group_table()
    groups = [one for one in places.values() if one["state"] == "CREATED" and len(one["bundles"]) == 2]
    assert any(len(set(one["bundles_to_node_id"].values())) == 2 for one in groups), places

def test_an_actor_that_is_killed_is_told_and_started_again(world):
    def parent_of_the_fork_server():
        with open(f"/proc/{os.getppid()}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])

    actors = world.run(parent_of_the_fork_server, world_size=2)

    def killed():
        if dist.get_rank() == 0:
            os.kill(actors[1], signal.SIGKILL)
            dist.recv(torch.empty(1), src=1)
        time.sleep(30)

    with pytest.raises(RankDied, match="rank 1 went down with the process that had forked it"):
        world.run(killed, world_size=2)
    assert world.run(dist.get_rank, world_size=2) == [0, 1]

def test_a_cluster_without_room_says_how_much_there_is(world, monkeypatch):
    import pdlcheck.worlds.ray.world as module
    monkeypatch.setattr(module, "RAY_ROOM_S", 1.0)
    with pytest.raises(WorldTooSmall, match="needs 9 ranks with one CPU each, .* it has 4 in all.*world_size=4"):
        world.run(dist.get_rank, world_size=9)

def test_close_gives_all_places_back(world):
    world.run(dist.get_rank, world_size=2)
    world.close()
    table = ray.util.placement_group_table().values()
    assert sum(one["state"] == "CREATED" for one in table) <= 1  # the session's own world
'''


@pytest.fixture
def cluster():
    """Return a cluster of two nodes, both on this machine; this process does not join it."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    made.add_node(num_cpus=2)
    yield made
    made.shutdown()


@pytest.mark.slow
def test_the_world_of_ray(tmp_path, cluster):
    (tmp_path / "test_on_ray.py").write_text(TESTS)
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "RAY_"))}
    own["RAY_ADDRESS"] = cluster.address
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--world", "ray", "--color=no"]
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, timeout=300, check=False)
    text = done.stdout + done.stderr
    assert "1 failed, 5 passed" in text, text
    assert "assert 1 == 0" in text, text
    assert "tests that ran on ranks: 2 on ray" in text, text
