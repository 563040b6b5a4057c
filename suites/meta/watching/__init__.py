"""Tests of pdlcheck.watch: each violation with its message and its right twin."""
