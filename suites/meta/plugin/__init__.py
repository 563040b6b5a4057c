"""Tests of the pytest plugin from outside: verdicts, fixtures, output, limits, and other plugins."""
