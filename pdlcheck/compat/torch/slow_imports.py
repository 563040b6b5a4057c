"""The private modules of torch that take long to import."""

from __future__ import annotations

from typing import Final

__all__ = ["SLOW_IMPORTS"]

# The first DDP or optimizer step imports it: 0.9 s, once in the fork server instead of in every rank. It is in no table
# of private names: a test whether it is there would import it, and without it ranks are only slower.
SLOW_IMPORTS: Final = ("torch._dynamo",)
