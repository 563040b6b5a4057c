"""Checkpoints: what they hold, what is refused, and trainings that go on from them."""
