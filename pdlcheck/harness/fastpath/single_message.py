"""Items whose phases need one message, because nothing of the user's is set up or torn down around their body.

Every message to the ranks is a round trip through three processes, which is a notable part of a trivial test. If no
fixture and no hook of the user's or of another plugin runs, set-up and teardown cannot fail, wait or write anything.
Then no test or plugin can observe that they share a message with the body.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import pytest

from pdlcheck.compat.pytest.config import conftest_files
from pdlcheck.compat.pytest.fixtures import definitions_of, is_direct_parameter
from pdlcheck.compat.pytest.items import set_up_state
from pdlcheck.harness.fastpath.switch import is_plain
from pdlcheck.harness.running.examples import RANK_FIXTURES, is_property

__all__ = ["fits_single_message", "only_own_teardown"]

_OURS = RANK_FIXTURES - {"subject"}  # it fails if --subject cannot be loaded
_HOOKS = ("pytest_runtest_setup", "pytest_runtest_teardown", "pytest_fixture_setup", "pytest_fixture_post_finalizer")

_looked_at = pytest.StashKey[tuple[frozenset[object], bool]]()  # the conftest files; whether one has such a hook


def fits_single_message(item: pytest.Function) -> bool:
    """Return, in the controller, whether all phases of an item may share one message.

    Such an item uses only our own fixtures, is no property (those have many examples), and no conftest file has a hook
    for it. With ``--setup-show``, each phase is shown, so none may share a message.
    """
    if is_plain(item.config):
        return False
    known = all(name == "request" or _is_known(item, name) for name in item.fixturenames)
    return known and not is_property(item) and not _users_hooks(item) and not item.config.getoption("setupshow", False)


def only_own_teardown(item: pytest.Function, nextitem: pytest.Item | None) -> bool:
    """Return, in a rank, whether no fixture of wider scope, which an earlier item has set up, ends with this item."""
    kept = {item, *(nextitem.listchain() if nextitem is not None else ())}
    stack = set_up_state(item.session).stack
    return all(node in kept or len(finalizers) == 1 for node, (finalizers, _) in stack.items())  # 1: the node's own


def _is_known(item: pytest.Function, name: str) -> bool:
    """Return whether a fixture is ours, or a value that ``parametrize`` passes unchanged.

    A parameter of a user's fixture is not such a value.
    """
    definitions = definitions_of(item).get(name, ())
    if len(definitions) != 1:
        return False
    return name in _OURS or (name in item.callspec.params and is_direct_parameter(definitions[0]))


def _users_hooks(item: pytest.Item) -> bool:
    config = item.config
    files = conftest_files(config)
    known, some = config.stash.get(_looked_at, (frozenset(), False))
    if files != known:
        some = _some_of(files, config.hook)
        config.stash[_looked_at] = frozenset(files), some
    return some and _some_of(files, item.ihook)


def _some_of(files: Set[object], hooks: Any) -> bool:
    return any(impl.plugin in files for hook in _HOOKS for impl in getattr(hooks, hook).get_hookimpls())
