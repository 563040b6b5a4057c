"""Tests of what pdlcheck replaces in the user's process, and of the private names that it needs."""
