"""Pipelines, and their schedules."""
