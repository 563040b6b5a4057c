"""Ways to run a pytest test on N processes, measured side by side; ``harness_peers.py`` is the command."""
