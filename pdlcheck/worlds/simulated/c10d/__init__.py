"""What ``torch.distributed`` is to a simulated rank."""
