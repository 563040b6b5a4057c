"""Tests of the simulated cluster: semantics, schedules, the clock, and per-rank state."""
