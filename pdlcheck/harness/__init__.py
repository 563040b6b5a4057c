"""The implementation of ``pdlcheck.plugin``: how pytest items run on ranks."""
