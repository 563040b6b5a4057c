"""The checks reject broken subjects, say why, and accept the correct twins."""
