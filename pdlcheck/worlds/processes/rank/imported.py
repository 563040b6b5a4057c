"""What a module draws while it is imported is the same on every rank, as in processes that a launcher has started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["drawing_as_torch_begins"]

_FIRST = torch.Generator().initial_seed()  # a constant of torch: that of its default generator, too, at first


@contextmanager
def drawing_as_torch_begins() -> Iterator[None]:
    """Have torch's random numbers start as in a new process; afterwards the rank's own go on."""
    own = torch.default_generator.get_state()
    torch.default_generator.manual_seed(_FIRST)
    try:
        yield
    finally:
        torch.default_generator.set_state(own)
