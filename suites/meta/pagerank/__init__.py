"""PageRank from outside: its command, memory, the backend of networkx, and the packages it is compared with."""
