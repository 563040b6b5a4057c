"""The benchmark suites of pdlcheck; ``pdlcheck bench`` runs them."""
