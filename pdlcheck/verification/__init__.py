"""The work of ``pdlcheck verify``: the suites in one pytest session, and the primitives on real input."""
