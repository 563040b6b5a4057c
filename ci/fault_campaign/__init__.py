"""Seeded faults for the ranks of real pytest runs: the faults, the runs, and the required outcomes."""
