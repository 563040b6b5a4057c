"""Scripts that know nothing of pdlcheck, run on ranks: ``pdlcheck run``."""
