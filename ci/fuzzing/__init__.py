"""Arbitrary bytes for everything that reads bytes; the command is ci/fuzz_readers.py."""
