"""Environment variables that a rank sets are its own; those of wider fixtures hold on every rank."""

from __future__ import annotations

import pytest

SOURCE = """
@W
def test_sets(rank):
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
    if rank:
        del os.environ["GIVEN"]
    dist.barrier()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == str(rank)
    assert ("GIVEN" in os.environ) is (rank == 0)

@pytest.fixture
def own(rank):
    os.environ["OWN"] = f"rank {rank}"
    yield
    dist.barrier()
    assert os.environ.pop("OWN") == f"rank {rank} and more"

@W
def test_fixture(rank, own):
    os.environ["OWN"] += " and more"
    dist.barrier()
    assert os.environ["OWN"] == f"rank {rank} and more"

@W
def test_function(world_size, rank, monkeypatch):
    monkeypatch.setenv("PATCHED", str(rank))
    os.environ["BESIDE"] = str(rank)
    dist.barrier()
    assert os.environ["PATCHED"] == os.environ["BESIDE"] == str(rank)

def test_of_the_controller(world):
    def program():
        os.environ["OF"] = str(dist.get_rank())
        dist.barrier()
        return os.environ["OF"]

    assert world.run(program, world_size=2) == ["0", "1"]
    assert not os.environ.keys() & {"OF", "OWN", "BESIDE", "PATCHED"} and os.environ["GIVEN"] == "yes"
"""
WIDE = """
@pytest.fixture(scope="module")
def everybodys():
    os.environ["WIDE"] = "yes"
    yield
    assert os.environ.pop("WIDE") == "yes"

@W
def test_first(rank, everybodys, tmp_path):
    dist.barrier()
    assert os.environ["WIDE"] == "yes"

@W
def test_second(rank, everybodys): assert os.environ["WIDE"] == "yes"
"""


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_what_a_rank_sets_is_its_own(run, world, monkeypatch):
    monkeypatch.setenv("GIVEN", "yes")
    run(SOURCE, world=world).assert_outcomes(passed=4)


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_what_a_wider_fixture_sets_all_see(run, world):
    plain = "\ndef test_plain(everybodys): assert os.environ['WIDE'] == 'yes'\n"
    run(WIDE + plain, world=world).assert_outcomes(passed=3)


def test_rpc_on_simulated_ranks_is_told_with_the_cure(run):
    """The RPC agent of torch exists once a process, in C++."""
    source = (
        "from torch.distributed import rpc\n@W\ndef test_it(rank): rpc.init_rpc(str(rank), rank=rank, world_size=2)\n"
    )
    result = run(source, world="sim")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*simulated ranks are threads: run this on processes, with --world gloo*"])
