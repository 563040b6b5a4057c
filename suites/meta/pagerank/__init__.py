"""Tests of PageRank from outside: its command, memory, networkx backend, and the packages it is compared with."""
