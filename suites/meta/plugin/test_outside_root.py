"""Tests outside pytest's root folder, such as those of an installed package, also run on rank processes."""

from __future__ import annotations

import pytest

TESTS = """
import pytest

@pytest.fixture(scope="module")
def wide():
    return []

class TestMethods:
    @pytest.mark.world_size(2)
    def test_method(self, rank, wide): wide.append(rank)

@pytest.mark.world_size(2)
@pytest.mark.parametrize("n", [1, 2])
def test_body(rank, n, wide): assert wide == [rank]
"""


@pytest.fixture
def environment(tmp_path_factory, monkeypatch):
    """Return a virtual environment with a package that contains tests."""
    environment = tmp_path_factory.mktemp("environment")
    (environment / "pyvenv.cfg").write_text("home = /nowhere\n")  # makes pytest skip the folder
    folder = environment / "lib" / "outside_package" / "suites" / "inner"
    folder.mkdir(parents=True)
    for each in (folder, folder.parent, folder.parents[1]):
        (each / "__init__.py").touch()
    (folder.parents[1] / "conftest.py").write_text("pytest_plugins = []\n")  # --pyargs allows it there
    (folder / "test_inner.py").write_text(TESTS)
    (folder.parent / "test_outer.py").write_text(TESTS)
    monkeypatch.setenv("PYTHONPATH", str(environment / "lib"))
    return environment


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "number"),
    [
        (["outside_package.suites"], 6),
        (["outside_package"], 6),
        (["outside_package.suites.test_outer"], 3),
        (["outside_package.suites.test_outer::TestMethods"], 1),
        (["outside_package.suites.inner", "outside_package.suites.test_outer"], 6),
    ],
    ids=["folder", "package", "module", "class", "several"],
)
@pytest.mark.usefixtures("environment")
def test_an_installed_package_is_tested_by_its_name(pytester, names, number):
    result = pytester.runpytest_subprocess("--pyargs", *names, "--world", "gloo", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=number)


@pytest.mark.slow
def test_a_folder_beside_the_root_is_tested_by_its_path(pytester, environment):
    (environment / "pyvenv.cfg").unlink()
    (environment / "lib" / "outside_package" / "conftest.py").unlink()
    folder = environment / "lib" / "outside_package"
    options = ("--world", "gloo", "-p", "no:cacheprovider")
    pytester.runpytest_subprocess("--rootdir", pytester.path, folder, *options).assert_outcomes(passed=6)
