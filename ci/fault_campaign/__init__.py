"""Seeded faults for the ranks of real pytest runs: what goes wrong, how it is run, what must be seen afterwards."""
