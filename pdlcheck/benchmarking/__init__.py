"""The command ``pdlcheck bench``: it runs the benchmark suites in one pytest session and prints one table."""
