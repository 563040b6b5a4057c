"""Checks of the gradients of replicas."""
