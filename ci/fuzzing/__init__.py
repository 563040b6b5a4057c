"""Fuzzing of every reader with arbitrary bytes; the command is ci/fuzz_readers.py."""
