"""PageRank of other packages, asked the same questions as ours.

``pagerank_peers.py`` and ``pagerank_disagreements.py`` are the commands.
"""
