"""The zoo: real bugs of public projects as small programs, each with its correct twin and the check that finds it."""

from importlib import import_module
from pkgutil import iter_modules

from .entry import ENTRIES, Entry, Judgement, Verdict, judge

__all__ = ["ENTRIES", "Entry", "Judgement", "Verdict", "judge"]

for _topic in iter_modules(__path__):
    if not _topic.name.startswith("test_"):
        import_module(f"{__name__}.{_topic.name}")  # its programs enter ENTRIES
