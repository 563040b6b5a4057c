"""Checks that replicas start alike, stay alike, and synchronise by the right rule."""
