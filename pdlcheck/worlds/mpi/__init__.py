"""A backend of ``torch.distributed`` over MPI, for torch wheels that are built without one.

Importing this module registers it; MPI itself starts with the first process group. In a script for
``mpiexec -n 4 python train.py``::

    import torch.distributed as dist
    import pdlcheck.worlds.mpi

    dist.init_process_group("pdlcheck_mpi")

Rank and world size are those of the launcher (torchrun's variables where they are set, else MPI's own). All
collectives, messages, sub-groups, object collectives and asynchronous forms run on tensors of the CPU. It needs mpi4py
and an MPI: ``pip install 'pdlcheck[mpi]'`` brings both.
"""

from pdlcheck.worlds.mpi.backend import BACKEND, register

__all__ = ["BACKEND", "register"]

register()
