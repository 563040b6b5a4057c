"""Hypothesis strategies for the simulated world."""

from __future__ import annotations

from hypothesis import strategies as st

from pdlcheck.worlds.semantics import Semantics

__all__ = ["semantics"]


@st.composite
def semantics(draw: st.DrawFn, *, buffered: bool = True) -> Semantics:
    """Every legal way to carry operations out, with all checks on; shrinks to the default.

    Args:
        buffered: let sends end before they are received, too; False draws what a program must stand everywhere.

    Example:
        >>> from hypothesis import given
        >>> @given(semantics())
        ... def test(semantics):
        ...     SimulatedWorld(semantics=semantics).run(program, world_size=2)
    """
    send = draw(st.sampled_from(["rendezvous", "eager", "buffered"] if buffered else ["rendezvous"]))
    return Semantics(
        send=send,
        eager_bytes=draw(st.sampled_from([1, 64, 4096])) if send == "eager" else 0,
        data=draw(st.sampled_from(["at_once", "at_wait", "random"])),
        completion=draw(st.sampled_from(["in_order", "random"])),
        reduce=draw(st.sampled_from(["rank_order", "reversed", "random"])),
    )
