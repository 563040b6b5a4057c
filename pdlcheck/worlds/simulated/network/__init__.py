"""The engine of the simulated world: it matches operations, moves their data, and holds buffers."""
