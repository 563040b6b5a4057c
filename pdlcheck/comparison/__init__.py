"""The command ``pdlcheck compare``: runs of benchmarks side by side, machines or commits."""
