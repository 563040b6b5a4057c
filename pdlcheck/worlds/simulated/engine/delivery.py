"""The writes of results to the tensors of a rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdlcheck.operations.kind import Write

__all__ = ["write"]


def write(writes: Sequence[Write], *, as_user: bool) -> None:
    """Write the values through ``.data``, so that version counters of tensors show only the user's writes.

    With ``as_user``, the version counters change too. If autograd has saved such a tensor, its backward pass raises. A
    sparse tensor gets new indices and values, which ``.data`` would keep to itself; its version always changes.
    """
    for output, value in writes:
        if as_user and not output.is_inference():
            torch.autograd.graph.increment_version(output)
        if output.layout == torch.strided:
            output.data.copy_(value.data if value.shape == output.shape else value.data.reshape(output.shape))
        else:
            with torch.no_grad():
                output.copy_(value.data)
