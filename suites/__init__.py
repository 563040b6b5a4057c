"""The suites: every primitive against its checks, on every world. Packaged as ``pdlcheck.suites``."""
