"""Fixtures in which ranks wait for one another, and fixtures that hang."""

from __future__ import annotations

import pytest

MEET = """
@pytest.fixture
def model(rank):
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        dist.broadcast(model.weight.fill_(rank + 1.0), 1)
    return model

@pytest.fixture
def pair():
    group = dist.new_group([0, 1])
    yield group
    dist.barrier(group=group)
    dist.destroy_process_group(group)

@pytest.fixture
def named(rank, monkeypatch):
    monkeypatch.setenv("NAMED", str(rank))
    dist.barrier()
    assert os.environ["NAMED"] == str(rank)
    yield [rank]
    assert os.environ["NAMED"] == str(rank)
    dist.barrier()
    assert os.environ["NAMED"] == str(rank)

@pytest.fixture
def inside(request, rank):
    return [request.getfixturevalue("named"), request.getfixturevalue("rank"), rank]

@pytest.fixture(params=["a", "b"])
def letter(request, tmp_path, rank):
    dist.barrier()
    (tmp_path / "letter").write_text(f"{request.param}{rank}")
    return tmp_path / "letter"

@W
def test_model(model): assert model.weight.tolist() == [[2.0, 2.0]]

@W
def test_group(rank, pair, tmp_path): dist.barrier(group=pair)

@W
def test_nested(inside, named, rank): assert inside == [named, rank, rank] and named == [dist.get_rank()]

class TestMethods:
    @pytest.fixture(autouse=True)
    def number(self, rank):
        self.rank = rank
        dist.barrier()
        assert self.rank == rank

    @W
    def test_method(self, rank, letter, request):
        assert letter.read_text()[1] == str(self.rank) == str(rank)
        dist.barrier()
        assert request.instance is self

@pytest.fixture
def fails_on_one(rank, pair):
    if rank == 1:
        raise OSError("no such disk")
    dist.barrier()

@W
def test_fails(fails_on_one): pass

@pytest.fixture
def differs(rank): dist.all_reduce(torch.ones(2 + rank))

@W
def test_differs(differs): pass

def test_after(): assert "NAMED" not in os.environ
"""


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_ranks_may_wait_for_one_another_in_fixtures_of_function_scope(run, world):
    result = run(MEET, world=world)
    result.assert_outcomes(passed=6, errors=2)
    result.stdout.fnmatch_lines_random(
        ["*OSError: no such disk", "*rank 0 was stopped in barrier*", "*CollectiveMismatch: ranks 0 and 1 met in *"]
    )


def test_on_sim_a_wider_fixture_that_waits_for_other_ranks_is_told_with_the_cure(run):
    source = """
@pytest.fixture(scope="module")
def group(): return dist.new_group([0, 1])

@pytest.fixture
def made(group): return group

@W
def test_it(made): pass

@W
def test_it_stays(group): pass
"""
    run(source, world="gloo").assert_outcomes(passed=2)
    result = run(source, world="sim")
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(["*Deadlock: no rank can go on*", "*set up once for all simulated ranks: let ranks *"])


LATE = """
@pytest.fixture
def late(rank):
    dist.barrier()
    yield [rank]
    dist.barrier()

@pytest.fixture
def later(request): return request.getfixturevalue("late")

@W
def test_asks(request, rank):
    assert request.getfixturevalue("later") == request.getfixturevalue("late") == [rank]
    dist.barrier()

@W
@pytest.mark.parametrize("name", ["late", "later"])
def test_asks_with_a_folder(request, tmp_path, rank, name):
    dist.barrier()
    assert request.getfixturevalue(name) == [rank]
    (tmp_path / "mine").write_text(str(rank))
    dist.barrier()
    assert (tmp_path / "mine").read_text() == str(rank)

@pytest.fixture
def meets_at_the_end(late, tmp_path, rank):
    (tmp_path / "mine").write_text(str(rank))
    yield
    dist.barrier()
    assert (tmp_path / "mine").read_text() == str(rank)

@W
def test_ends(meets_at_the_end): pass

@pytest.fixture
def fails(rank):
    if rank == 0:
        raise OSError("no such disk")
    dist.barrier()

@W
def test_fails(request): request.getfixturevalue("fails")

@W
def test_after(request, late): dist.barrier()
"""


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_ranks_may_wait_for_one_another_in_fixtures_that_a_body_asks_for(run, world):
    result = run(LATE, "-p", "no:randomly", world=world)
    result.assert_outcomes(passed=5, failed=1)
    result.stdout.fnmatch_lines(["*OSError: no such disk", "*rank 1 was stopped in barrier*"])


def test_on_sim_a_wider_fixture_that_a_body_asks_for_and_that_waits_is_told_with_the_cure(run):
    source = """
@pytest.fixture(scope="module")
def group(): return dist.new_group([0, 1])

@W
@pytest.mark.parametrize("again", [0, 1])
def test_it(request, again): assert request.getfixturevalue("group").size() == 2
"""
    run(source, world="gloo").assert_outcomes(passed=2)
    result = run(source, world="sim")
    result.assert_outcomes(failed=2)
    told = "*Unsupported: the fixture 'group' waits for other ranks; *set up once for all simulated ranks: let ranks *"
    result.stdout.fnmatch_lines([told, told])


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_a_fixture_that_hangs_on_one_rank_is_one_error(run, pytester, world):
    source = """
import time

@pytest.fixture
def meets(rank):
    dist.barrier()
    yield
    dist.barrier()
    with open("torn-down", "a") as file:
        file.write(str(rank))

@pytest.fixture
def hangs(meets, rank):
    if rank == 1:
        time.sleep(60)
    dist.barrier()

@W
@pytest.mark.timeout(2)
def test_it(hangs): pass

@W
def test_after(meets): pass
"""
    result = run(source, world=world)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*time.sleep(60)*"])
    tests = 2 if world == "sim" else 1  # simulated ranks have all set up; processes are killed
    assert sorted((pytester.path / "torn-down").read_text()) == sorted("01" * tests)


def test_a_hint_that_is_kept_with_the_error_of_a_fixture_is_given_once(run, pytester):
    pytester.makeconftest(
        "import pytest, torch.distributed as dist\n\n"
        "@pytest.fixture(scope='session', autouse=True)\ndef all_there(): dist.barrier()\n"
    )
    source = "".join(f"@W\ndef test_{number}(tmp_path): pass\n\n" for number in range(3))
    result = run(source, "-rN", world="sim")  # without the summary, which repeats it, in full if CI is set
    result.assert_outcomes(errors=3)
    assert result.stdout.str().count("set up once for all simulated ranks: let ranks") == 3
