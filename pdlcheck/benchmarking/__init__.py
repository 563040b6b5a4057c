"""The command ``pdlcheck bench``: the benchmark suites in one pytest session, and one table at the end."""
