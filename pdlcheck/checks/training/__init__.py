"""The check of a whole training: the checks that its parts allow, and one table of their verdicts."""
