"""Items on simulated ranks: all ranks are in this process."""
