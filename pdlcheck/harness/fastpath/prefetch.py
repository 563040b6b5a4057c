"""Items that begin on their ranks while the controller still reports the previous item.

A trivial test takes the controller about as long as the ranks, and neither needs the other in that time. An item that
begins early must be certain to run, and nothing that runs between two items may affect it. Therefore the hooks around
items must be those of pytest and of known plugins, and the item must use nothing except ranks.
"""

from __future__ import annotations

import pytest

from pdlcheck.harness.collection import cases
from pdlcheck.harness.fastpath.single_message import fits_single_message
from pdlcheck.harness.fastpath.switch import is_plain
from pdlcheck.harness.running.next_item import next_of, remember_next

__all__ = ["prefetchable_item"]

# Hooks that report, such as pytest_runtest_logreport, may come from any plugin. A worker of pytest-xdist has its own
# runtestloop, which receives only one item ahead.
_HOOKS = (
    *("pytest_runtestloop", "pytest_runtest_protocol", "pytest_runtest_setup", "pytest_runtest_call"),
    *("pytest_pyfunc_call", "pytest_runtest_teardown", "pytest_runtest_makereport"),
)
# Between two items, the hooks of these plugins only affect the controller, or items that fail.
_KNOWN = (
    *("_hypothesis_pytestplugin.", "_pytest.", "anyio.", "pdlcheck."),
    *("pytest_benchmark.", "pytest_cov.", "pytest_randomly.", "pytest_timeout."),
)
_MARKS = frozenset({"filterwarnings", "parametrize", "timeout", "world_size"})

_looked_at = pytest.StashKey[tuple[int, bool]]()  # the number of plugins; whether all of them are known
_places = pytest.StashKey[dict[pytest.Item, int]]()


def prefetchable_item(item: pytest.Function) -> pytest.Function | None:
    """Return the next item if it may begin on the ranks of ``item``, which has passed there; otherwise None."""
    config, session, following = item.config, item.session, next_of(item)
    if not isinstance(following, pytest.Function) or cases.case_of(following) != cases.case_of(item):
        return None
    if is_plain(config) or session.shouldfail or session.shouldstop or config.getoption("pdl_rank_pdb") is not None:
        return None
    if not _knows_plugins(config):
        return None
    if any(mark.name not in _MARKS for one in (item, following) for mark in one.iter_markers()):
        return None
    if not (cases.begins_with_group(item) and cases.begins_with_group(following)):
        return None
    return following if fits_single_message(following) and _remember_the_one_after(item, following) else None


def _knows_plugins(config: pytest.Config) -> bool:
    number = len(config.pluginmanager.list_name_plugin())
    if config.stash.get(_looked_at, (0, False))[0] != number:
        impls = [impl for hook in _HOOKS for impl in getattr(config.hook, hook).get_hookimpls()]
        known = all(f"{impl.function.__module__}.".startswith(_KNOWN) for impl in impls)
        config.stash[_looked_at] = number, known
    return config.stash[_looked_at][1]


def _remember_the_one_after(item: pytest.Item, following: pytest.Item) -> bool:
    """Record the item after ``following``; return False if items run in another order than they were collected."""
    items, stash = item.session.items, item.session.stash
    if _places not in stash:
        stash[_places] = {item: place for place, item in enumerate(items)}
    place = stash[_places].get(item, -1)
    if place < 0 or items[place + 1 : place + 2] != [following]:
        return False
    remember_next(following, items[place + 2] if place + 2 < len(items) else None)
    return True
