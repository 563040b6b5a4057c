"""Tests of the world ``ray`` on a cluster of two Ray nodes on this machine."""
