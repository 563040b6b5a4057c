"""The examples of the README and of docs/ run, and print the output that is shown there."""

from __future__ import annotations

import re
import shlex

import pytest

from ..clone import ROOT

PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if page.exists()]
BLOCKS = re.compile(r"```python\n# (test_\w+\.py)\n(.*?)```\n+```text\n\$ pytest (.*?)\n(.*?)```", re.DOTALL)
NUMBER = re.compile(r"-?\d+\.\d{4,}")
DURATION = re.compile(r" +\d+\.\d$")  # the last column of a table
FOUND = [example for page in PAGES for example in BLOCKS.findall(page.read_text())]  # empty in a wheel
EXAMPLES = list({example[0]: example for example in FOUND}.values())


def _words(line):
    """Split a line into its text without long numbers, and the numbers, whose last digits depend on the machine."""
    line = DURATION.sub(" #", line)
    return NUMBER.sub("#", line.rstrip()), [float(number) for number in NUMBER.findall(line)]


def _same(one, other):
    (words, numbers), (other_words, other_numbers) = _words(one), _words(other)
    return words == other_words and numbers == pytest.approx(other_numbers)


@pytest.mark.skipif(not EXAMPLES, reason="needs README.md and docs/: run the suites in a clone of the repository")
@pytest.mark.parametrize(("name", "source", "options", "told"), EXAMPLES, ids=[example[0] for example in EXAMPLES])
def test_an_example_prints_what_its_page_says(pytester, name, source, options, told):
    (pytester.path / name).write_text(f"# {name}\n{source}")
    # An inner session forgets the modules that it imports, and numba cannot be imported twice.
    run = pytester.runpytest_subprocess if "pagerank" in source else pytester.runpytest_inprocess
    printed = iter(run(*shlex.split(options)).outlines)
    for line in told.splitlines():
        if line not in ("", "..."):
            assert any(_same(line, out) for out in printed), f"this line of the page was not printed: {line}"


def test_the_pages_have_examples_and_a_name_means_one_of_them():
    assert not PAGES or {"test_ring.py", "test_step.py", "test_cache.py"} <= {example[0] for example in EXAMPLES}
    assert len(set(FOUND)) == len(EXAMPLES)
