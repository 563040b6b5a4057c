"""Temporary folders of ranks, their own and the shared one, and the cache, which belongs to the session."""

from __future__ import annotations

import pytest

from ..conftest import HEAD


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_tmp_path_is_the_ranks_own_and_shared_tmp_path_is_one(run, world, pytester):
    source = """
@W
def test_paths(rank, tmp_path, shared_tmp_path, tmp_path_factory):
    (tmp_path / "mine").write_text(str(rank))
    (shared_tmp_path / str(rank)).write_text("")
    paths = [None, None]
    dist.all_gather_object(paths, (str(tmp_path), str(shared_tmp_path)))
    assert paths[0][0] != paths[1][0] and paths[0][1] == paths[1][1]
    assert (tmp_path / "mine").read_text() == str(rank)
    assert sorted(os.listdir(shared_tmp_path)) == ["0", "1"]
    assert tmp_path_factory.mktemp("more").is_dir()

@W
def test_shared_is_new(shared_tmp_path):
    assert os.listdir(shared_tmp_path) == []

@W
def test_fails(rank, tmp_path, shared_tmp_path):
    (tmp_path / "kept").write_text("")
    (shared_tmp_path / "kept").write_text("")
    dist.barrier()
    assert rank == 0
"""
    base = pytester.path / "base"
    result = run(source, f"--basetemp={base}", "-o", "tmp_path_retention_policy=failed", world=world)
    result.assert_outcomes(passed=2, failed=1)
    kept = sorted(path.parent.name for path in base.rglob("kept") if "current" not in str(path))
    assert [name[:10] for name in kept] == ["test_fails"] * (3 if world == "gloo" else len(kept)), kept
    assert not list(base.rglob("mine")), "the folders of tests that passed are gone"
    assert all("shared" not in path.name for path in base.iterdir() if "test_paths" in path.name)


CACHE = """
@pytest.fixture
def slow(cache):
    assert cache.get("mine/known", None) == "by the controller"
    return cache

@W
def test_reads_and_writes(rank, slow, request):
    assert request.config.cache is slow
    slow.set(f"mine/of {rank}", [rank])
    (slow.mkdir("mine") / str(rank)).touch()

@W
def test_values_are_those_of_one_rank(rank, cache):
    for _ in range(100):
        cache.set("mine/both", "x" * (1 + 9 * rank))
        assert cache.get("mine/both", None) in ("x", "x" * 10)
"""


@pytest.mark.parametrize("world", ["gloo", "sim"])
def test_the_cache_is_that_of_the_session(pytester, world):
    pytester.makeini("[pytest]\ncache_dir = kept")
    pytester.makeconftest("def pytest_configure(config): config.cache.set('mine/known', 'by the controller')")
    pytester.makepyfile(HEAD + CACHE)
    pytester.runpytest_inprocess("--world", world, "-p", "no:randomly").assert_outcomes(passed=2)
    values = pytester.path / "kept" / "v" / "mine"
    assert sorted(path.name for path in values.iterdir()) == ["both", "known", "of 0", "of 1"]
    assert sorted(path.name for path in (pytester.path / "kept" / "d" / "mine").iterdir()) == ["0", "1"]
    pytester.runpytest_inprocess("--world", world, "--lf", "--ff", "--cache-clear").assert_outcomes(passed=2)


@pytest.mark.parametrize("world", ["gloo", "sim"])
def test_a_cache_that_cannot_be_written_is_a_warning(pytester, world):
    pytester.makepyfile(HEAD + "@W\ndef test_sets(rank, cache): cache.set('mine/value', 1)")
    (pytester.path / ".pytest_cache").touch()
    result = pytester.runpytest_inprocess("--world", world, "-W", "default::pytest.PytestCacheWarning")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*PytestCacheWarning: could not create cache path */mine*"])


def test_without_its_plugin_the_cache_is_missing_in_ranks_too(run):
    run("@W\ndef test_it(cache): pass").stdout.fnmatch_lines(["E * fixture 'cache' not found"])
