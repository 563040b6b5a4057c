"""What ``pdlcheck verify`` runs: the suites in one pytest session, and the primitives on real input."""
