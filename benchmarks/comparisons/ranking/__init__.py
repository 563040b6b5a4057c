"""PageRank of other packages on the same questions as ours.

``pagerank_peers.py`` and ``pagerank_disagreements.py`` are the commands.
"""
