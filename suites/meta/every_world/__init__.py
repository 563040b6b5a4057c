"""What holds on simulated ranks and on processes alike."""
