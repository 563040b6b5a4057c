"""The command ``pdlcheck pagerank``: a file of edges is read, ranked and shown."""
