"""What a kind of world must offer so that pytest items run on its worlds. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

import pytest

from pdlcheck.worlds.registry import item_runner_of

if TYPE_CHECKING:
    from pdlcheck.harness.collection.cases import Case
    from pdlcheck.worlds import World

__all__ = ["ItemRunner", "RankedItem", "runner_of"]


class RankedItem(Protocol):
    """The ranks' side of one item."""

    def setup(self) -> None:
        """Set up the fixtures of every rank."""

    def call(self, drawn: dict[str, Any]) -> None:
        """Run the body on every rank, with these arguments besides the fixtures."""

    def teardown(self) -> None:
        """Tear down the fixtures of every rank and release the ranks."""


class ItemRunner(Protocol):
    """The functions of a module by which pytest items run on one kind of world.

    A world names its module in the registry. The module must not import torch when it is imported.
    """

    def load(self) -> None:
        """Import what the first item on such a world needs, where that takes long."""

    def check_options(self, config: pytest.Config) -> None:
        """Raise a usage error if an option that only such worlds read is invalid."""

    def options(self, config: pytest.Config, name: str) -> Mapping[str, Any]:
        """Return the options of :func:`pdlcheck.worlds.get_world` for a session."""

    def timed_options(self) -> Mapping[str, Any]:
        """Return the further options of a world whose ranks are measured; empty if it needs none."""

    def adapt(self) -> None:
        """Adapt this process to a new world; called for each world."""

    def prepare(self, item: pytest.Item, world: World) -> None:
        """Apply the markers of an item to its world, before the item is set up."""

    def suspend(self, world: World) -> None:
        """Take back what the world exchanges in this process, for a test without ranks."""

    def limited(self, item: pytest.Item, world: World) -> AbstractContextManager[None]:
        """Limit the calls of a block on the world to the time that the item has left."""

    def with_faults(self, world: World, faults: Sequence[Any]) -> AbstractContextManager[None]:
        """Inject the faults of a marker into the runs of a block."""

    def ranked_item(self, item: pytest.Function, case: Case, world: World) -> RankedItem:
        """Return the ranks' side of an item."""

    def finish(self, config: pytest.Config, world: World, exitstatus: int) -> None:
        """End what the ranks keep from item to item, and raise the first error of it."""


def runner_of(world: World | str) -> ItemRunner:
    """Return the functions by which items run on a world, or on the world of this name."""
    name = world if isinstance(world, str) else world.name
    return cast(ItemRunner, import_module(item_runner_of(name)))
