"""Tests of parallel PyTorch code that run on a simulated cluster, on local processes and on GPUs.

Importing this package is cheap: torch is imported by the modules that use it.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
