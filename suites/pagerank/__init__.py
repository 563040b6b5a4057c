"""PageRank: the solver, its published versions, its kernels, and over ranks."""
