"""The command ``pdlcheck compare``: it compares benchmark runs of different machines or commits."""
