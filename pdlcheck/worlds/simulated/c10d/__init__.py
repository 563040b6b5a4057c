"""The view that a simulated rank has of ``torch.distributed``."""
