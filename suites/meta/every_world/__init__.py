"""Tests of behaviour that simulated ranks and processes share."""
