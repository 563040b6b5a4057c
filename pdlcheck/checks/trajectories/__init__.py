"""Where training ends."""
