"""Checks of pipelines and their schedules."""
