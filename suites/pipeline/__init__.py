"""Tests of pipelines: schedules, stages, agreement between ranks, and refused uses."""
