"""Projects that use nothing of the plugin have the same outcome with and without it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from .projects import PROJECTS, Project

OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (.*)$", re.M)
SUMMARY = re.compile(r"^=+ (.*) in [\d.]+s.*=+$", re.M)


def outcome(folder, project, *arguments):
    """Return exit code, outcomes of tests, and counts, as pytest reports them."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PDLCHECK"))}
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "-p", "no:randomly", "--color=no"]
    done = subprocess.run(
        [*command, *arguments, *project.arguments],
        cwd=folder,
        env=clean | dict(project.environment),
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    text = done.stdout + done.stderr
    found = sorted((kind, re.sub(r" - .*", "", what)) for kind, what in OUTCOME.findall(text))
    return done.returncode, found, SUMMARY.findall(text), text


@pytest.mark.slow
@pytest.mark.parametrize("name", PROJECTS)
def test_a_project_that_uses_nothing_of_ours_runs_as_without_us(tmp_path, name):
    project = PROJECTS[name]
    for path, text in project.files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    *without, text_without = outcome(tmp_path, project, "-p", "no:pdlcheck")
    *with_us, text_with = outcome(tmp_path, project)
    assert without[1], text_without  # the project has tests
    assert "pdlcheck" not in text_with.replace("pdlcheck-0.1.0", "")
    assert with_us == without, text_with


def test_a_session_without_ranks_imports_little(tmp_path):
    """The imports of the plugin are its cost in such a session; guest_overhead.py measures it."""
    names = "[name for name in sys.modules if name.startswith('pdl' 'check')]"  # files with our name get more
    (tmp_path / "test_a.py").write_text(f"import sys\ndef test_a(): print('ours', *{names})\n")
    *_, text = outcome(tmp_path, Project({}, ("-s",)))
    (line,) = re.findall("^.*ours (.*)$", text, re.M)
    assert {"pdlcheck.plugin", "pdlcheck.harness.collection.cases"} <= {*line.split()}, text
    assert len(line.split()) <= 28, f"the plugin imports more than it did: {line}"
