"""The collection of tests: their worlds, world sizes and options."""
