"""Tests of the repository: its architecture, pages, commands and examples."""
