"""The gradients of replicas."""
