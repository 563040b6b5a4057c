"""The coverage data of ranks on other nodes."""

from __future__ import annotations

import pytest

from pdlcheck.errors import PdlcheckError
from pdlcheck.harness.collection import launch
from pdlcheck.harness.running.open_worlds import open_worlds

__all__ = ["bring_coverage"]


def bring_coverage(config: pytest.Config) -> None:
    """Fetch the coverage data of ranks on nodes of a launch that do not share this node's disk."""
    own = launch.launch(config)
    worlds = [world for world in open_worlds(config) if getattr(world, "is_placed", False)]
    if own is None or not launch.spans_nodes(config) or not worlds:
        return
    from pdlcheck.item_runners.processes.rank.coverage import fetch

    try:
        fetch(config, worlds[0], own.world_size)
    except PdlcheckError as error:  # for example, a launched process has ended
        config.issue_config_time_warning(
            pytest.PytestWarning(f"what ran on other nodes is not in the report of coverage: {error}"), stacklevel=1
        )
    worlds[0].close()
