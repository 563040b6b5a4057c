"""The simulated cluster: semantics, schedules, the clock, and what each rank has for itself."""
