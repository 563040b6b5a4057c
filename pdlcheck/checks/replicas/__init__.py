"""Replicas start alike, stay alike, and meet as they should."""
