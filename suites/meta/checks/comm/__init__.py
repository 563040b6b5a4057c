"""Tests that the checks reject broken subjects, name the cause, and accept the correct twins."""
