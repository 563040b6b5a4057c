"""The README's examples are run, and print what the README says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.compile(r"```python\n# (test_\w+\.py)\n(.*?)```\n+```text\n\$ pytest (.*?)\n(.*?)```", re.DOTALL)
NUMBER = re.compile(r"-?\d+\.\d{4,}")
EXAMPLES = BLOCKS.findall(README.read_text()) if README.exists() else []  # a wheel carries the suites alone


def _words(line):
    """A line without its long numbers, and the numbers: their last digits belong to the machine."""
    return NUMBER.sub("#", line.rstrip()), [float(number) for number in NUMBER.findall(line)]


def _same(one, other):
    (words, numbers), (other_words, other_numbers) = _words(one), _words(other)
    return words == other_words and numbers == pytest.approx(other_numbers)


@pytest.mark.skipif(not EXAMPLES, reason="needs README.md: run the suites in a clone of the repository")
@pytest.mark.parametrize(("name", "source", "options", "told"), EXAMPLES, ids=[example[0] for example in EXAMPLES])
def test_an_example_prints_what_the_readme_says(pytester, name, source, options, told):
    (pytester.path / name).write_text(f"# {name}\n{source}")
    printed = iter(pytester.runpytest_subprocess(*shlex.split(options)).outlines)
    for line in told.splitlines():
        if line not in ("", "..."):
            assert any(_same(line, out) for out in printed), f"the README's line was not printed: {line}"


def test_the_readme_has_examples():
    assert not README.exists() or len(EXAMPLES) == 3
