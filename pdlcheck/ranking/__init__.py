"""The command ``pdlcheck pagerank``: read a file of edges, rank its nodes and print the best."""
