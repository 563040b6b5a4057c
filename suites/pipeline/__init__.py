"""Pipelines: schedules, stages, what ranks agree on, and what is refused."""
