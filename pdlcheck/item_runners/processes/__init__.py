"""Items on rank processes: each process keeps a pytest session of its own."""
