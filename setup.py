"""The packages of the wheel: pdlcheck, with the suites and the benchmarks inside it.

Everything else stands in pyproject.toml, which can list packages of one folder only, or each by hand.
"""

from setuptools import find_packages, setup

SUITES = find_packages(include=["suites*"], exclude=["suites.meta*"])
BENCHMARKS = find_packages(include=["benchmarks"])

setup(packages=[*find_packages(include=["pdlcheck*"]), *(f"pdlcheck.{name}" for name in (*SUITES, *BENCHMARKS))])
