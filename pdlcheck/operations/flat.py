"""The calls on one flat tensor that holds a part for each rank."""

from __future__ import annotations

from torch import Tensor

from pdlcheck.operations.method import Group

__all__ = ["does_not_fit", "parts_of_output"]


def parts_of_output(group: Group, output: Tensor, input: Tensor, call: str) -> list[Tensor]:
    """Return the part of ``output`` for each rank's input.

    Raises:
        RuntimeError: the sizes do not fit.
    """
    size = group.size()
    if output.numel() != size * input.numel():
        raise does_not_fit(group, call, output, input, "an output")
    return list(output.view(size, *input.shape).unbind(0))


def does_not_fit(group: Group, call: str, output: Tensor, input: Tensor, larger: str) -> RuntimeError:
    """Return the error for an input and an output of ``call`` whose sizes do not fit; ``larger`` names one of them."""
    size = group.size()
    return RuntimeError(
        f"{call} on {size} ranks needs {larger} of {size} times as many elements, got an input of "
        f"{tuple(input.shape)} and an output of {tuple(output.shape)}"
    )
