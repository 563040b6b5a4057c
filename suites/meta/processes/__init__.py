"""Tests of the worlds whose ranks are processes of this machine."""
