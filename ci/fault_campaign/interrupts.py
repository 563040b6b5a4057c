"""Faults in which the whole pytest run is interrupted or killed."""

from __future__ import annotations

from fault_campaign.faults import Base, Fault

__all__ = ["ctrl_c", "kill_pytest"]


def ctrl_c(base: Base) -> Fault:
    """Interrupt the run at any moment from the start of Python to tests on a warm pool."""
    again = ("twice",) if base.rng.random() < 0.3 else ()
    return base.make(where="run", signo="SIGINT", action=again, delay_s=base.rng.uniform(0.1, 6.0), within_s=3.0)


def kill_pytest(base: Base) -> Fault:
    """Kill the run, so that no process is left to clean up."""
    return base.make(
        where="run",
        signo=base.rng.choice(["SIGKILL", "SIGTERM"]),
        delay_s=base.rng.uniform(0.1, 6.0),
        within_s=3.0,
    )
