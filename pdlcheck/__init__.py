"""Write a test of parallel PyTorch code once; run it on a simulated cluster, on local processes, on GPUs.

Importing this package costs nothing heavy: torch is imported by the modules that use it.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
