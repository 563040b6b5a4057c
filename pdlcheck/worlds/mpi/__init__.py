"""A backend of ``torch.distributed`` over MPI, for torch wheels that are built without one.

Importing this module registers the backend; MPI itself starts with the first process group. In a script for
``mpiexec -n 4 python train.py``::

    import torch.distributed as dist
    import pdlcheck.worlds.mpi

    dist.init_process_group("pdlcheck_mpi")

Rank and world size come from torchrun's variables if they are set, else from MPI. All collectives, messages,
sub-groups, object collectives and asynchronous forms run on CPU tensors. The backend needs mpi4py and an MPI library:
``pip install 'pdlcheck[mpi]'`` installs both.
"""

from pdlcheck.worlds.mpi.backend import BACKEND, register

__all__ = ["BACKEND", "register"]

register()
