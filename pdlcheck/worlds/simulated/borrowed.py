"""Groups that another rank made: what only module globals that ranks share can bring about."""

from __future__ import annotations

from pdlcheck.errors import Unsupported
from pdlcheck.worlds.simulated.scheduler import current_rank
from pdlcheck.worlds.watch import Operation

__all__ = ["require_own_group"]


def require_own_group(operation: Operation, network: object) -> None:
    """An operation would count as that of the rank whose end of the group it is posted on.

    Raises:
        Unsupported: that is another rank than the one that runs.
    """
    me, signature = current_rank(), operation.signature
    if me is None or me.rank == signature.rank or me.network is not network:
        return
    raise Unsupported(
        f"rank {me.rank} posts {signature.kind} on an object of {signature.group_text} that rank {signature.rank} "
        f"made, at {signature.where}: simulated ranks share module globals, while a process would have its own; "
        "keep it in the function that the ranks run, or run on processes (--world gloo)"
    )
