"""Reports and dumps of a hang, in words: ``pdlcheck explain``."""
