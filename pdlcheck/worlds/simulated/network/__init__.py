"""What operations of simulated ranks do: they meet, move data, and hold buffers."""
