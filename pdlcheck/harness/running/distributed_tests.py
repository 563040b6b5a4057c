"""The run of a ``DistributedTest`` or a ``DistributedFixture`` on the ranks of a world.

Each rank does what the base class would do. With ``_dist_run``, the ranks begin without a process group, and the class
creates it. A class without ``_dist_run`` has a group at the start, unless ``init_distributed`` is False.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pdlcheck.compat.deepspeed import give_arguments, makes_group, run_rank, set_current_test
from pdlcheck.compat.pytest.items import request_of

__all__ = ["run", "run_item"]


def run_item(item: pytest.Function) -> None:
    """Run the body of a test of a ``DistributedTest``."""
    __tracebackhide__ = True
    item.cls()(request_of(item))


def run(launched: Any, request: pytest.FixtureRequest) -> None:
    """Run the test or fixture of an instance on the ranks that its class requires.

    Args:
        launched: an instance of a class that derives from a ``DistributedTest`` or a ``DistributedFixture``.
        request: the request of the test, or of the fixture.
    """
    __tracebackhide__ = True
    is_test = isinstance(launched, request.cls or ())
    test = getattr(launched, request.function.__name__) if is_test else None
    arguments = _arguments(request, launched.run if test is None else test)
    _require_accelerator(launched)
    if test is not None:
        set_current_test(launched, test)
    give_arguments(launched, arguments)
    world: Any = request.getfixturevalue("world")
    for world_size in _sizes(launched, request, arguments, is_test=is_test):
        with world.open(world_size) as ranks:
            by_class = makes_group(launched)
            if by_class or not getattr(launched, "init_distributed", True):
                ranks.leave_group()
            if by_class:
                _skip(ranks.run(_as_the_class_does, launched, world_size, _meeting(request)))
            else:
                ranks.run(_call, launched, arguments)


def _as_the_class_does(launched: Any, world_size: int, meeting: str) -> object:
    """Run ``_dist_run`` of the class on a rank."""
    __tracebackhide__ = True
    rank, port = int(os.environ["RANK"]), os.environ["MASTER_PORT"]
    return run_rank(launched, rank, world_size, port, meeting)


def _call(launched: Any, arguments: Mapping[str, Any]) -> None:
    """Run ``run`` of the class on a rank."""
    __tracebackhide__ = True
    launched.run(**arguments)


def _arguments(request: pytest.FixtureRequest, function: Any) -> dict[str, Any]:
    """Return the values of the fixtures that a function names; an argument with a default need not be a fixture."""
    arguments = {}
    for name, parameter in inspect.signature(function).parameters.items():
        try:
            arguments[name] = request.getfixturevalue(name)
        except pytest.FixtureLookupError:
            if parameter.default is parameter.empty:
                raise
    return arguments


def _sizes(
    launched: Any, request: pytest.FixtureRequest, arguments: Mapping[str, Any], *, is_test: bool
) -> Sequence[int]:
    """Return the world sizes of the marker, of the argument ``world_size``, or of the class."""
    marker = request.node.get_closest_marker("world_size") if is_test else None
    if marker is not None:
        sizes = marker.args[0] if len(marker.args) == 1 else marker.args
    else:
        sizes = arguments.get("world_size", launched.world_size) if is_test else launched.world_size
    return [sizes] if isinstance(sizes, int) else list(sizes)


def _require_accelerator(launched: Any) -> None:
    """Skip the test if the class needs an accelerator and its framework finds none."""
    module = sys.modules.get(_base(launched).__module__)
    accelerator = getattr(module, "get_accelerator", None)
    if getattr(launched, "requires_cuda_env", False) and accelerator is not None and not accelerator().is_available():
        pytest.skip("only supported in accelerator environments.")


def _base(launched: Any) -> type:
    return next(base for base in type(launched).__mro__ if "requires_cuda_env" in vars(base) or base is object)


def _meeting(request: pytest.FixtureRequest) -> str:
    """Return the URL of a new file in which the ranks can meet."""
    folder: Path = request.getfixturevalue("tmp_path_factory").mktemp("meeting")
    return f"file://{folder}/ranks"


def _skip(said: Sequence[object]) -> None:
    """Skip the test if its ranks returned messages."""
    if messages := sorted({str(one) for one in said if one}):
        pytest.skip("; ".join(messages))
