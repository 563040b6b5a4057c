"""What pdlcheck exchanges in the user's process, and the private names it needs."""
