"""How a pytest item runs on ranks; what ``pdlcheck.plugin`` calls."""
