"""Programs that end alike on simulated ranks and on processes, and programs that only one of these worlds accepts.

A program is a function that returns plain values, or tensors if it trains. A function that is added to a file of this
folder is tested automatically.
"""

from __future__ import annotations

from inspect import isfunction

from pdlcheck.errors import Deadlock, LeakedWork

from . import collectives, functional, groups, messages, objects, reductions, refusals, training

__all__ = [
    "BOTH_REFUSE",
    "COARSE",
    "DIFFERENT",
    "LEFT_OPEN",
    "NOT_ON_MPI",
    "ONLY_GLOO",
    "ONLY_SIM",
    "REFUSALS",
    "SAME",
    "TRAINING",
]


def _programs(*modules):
    return [
        value
        for module in modules
        for name, value in vars(module).items()
        if isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]


# program -> error on gloo
ONLY_SIM = {
    collectives.all_gather_into_a_stack: (RuntimeError, "invalid tensor size at index 0"),
    collectives.all_gather_of_scalars_into_one: (RuntimeError, "invalid tensor size at index 0"),
    collectives.all_to_all_of_lists_of_different_lengths: (RuntimeError, "gloo said so of all_to_all, default group"),
    collectives.broadcast_of_what_gloo_has_no_type_for: (RuntimeError, "gloo said so of broadcast root 1 of uint16"),
    collectives.gather_of_complex_numbers: (RuntimeError, "gloo said so of gather root 1 of complex64 (2,), default"),
    reductions.multiplied_sums: (RuntimeError, "Cannot use ReduceOp.PREMUL_SUM with Gloo"),
    reductions.short_integers: (RuntimeError, "Invalid scalar type"),
}

# program -> error on sim
ONLY_GLOO = {messages.send_to_oneself_that_nobody_waits_for: (LeakedWork, "4 operations were left behind")}

# program -> error on sim, error on gloo
_COLUMN = (RuntimeError, "moves memory as it lies, whatever the strides, and got a tensor with other elements between")
BOTH_REFUSE = {
    collectives.all_reduce_of_a_column: (_COLUMN, _COLUMN),
    collectives.broadcast_of_a_column: (_COLUMN, _COLUMN),
    collectives.reduce_of_a_column: (_COLUMN, _COLUMN),
    collectives.scatter_of_columns: (_COLUMN, _COLUMN),
    messages.receive_from_oneself: ((Deadlock, "4 of 4 are blocked"), (RuntimeError, "state_ >= CONNECTED")),
}

# program -> the backends' behaviour where torch defines none
LEFT_OPEN = {
    reductions.maxima_and_minima_of_nan: "a NaN that does not come first is lost; each backend has an order of its own",
    reductions.reduce_in_place_on_every_rank: "gloo leaves partial sums on other ranks than the destination, sim NaN",
}

# program -> error on ranks of MPI
_GLOO_ALONE = (ValueError, "monitored_barrier is only implemented for GLOO")  # torch checks the backend's name
_DENSE = (NotImplementedError, "the mpi backend moves dense tensors")
NOT_ON_MPI = {
    collectives.barriers: _GLOO_ALONE,
    groups.barrier_of_a_group: _GLOO_ALONE,
    reductions.sums_of_sparse_tensors: _DENSE,
    training.ddp_with_a_sparse_embedding: _DENSE,
}

# program -> relative tolerance
COARSE = {training.ddp_with_the_fp16_hook: 1e-3}  # gradients are added in float16, which has 11 bits

TRAINING = _programs(training)
REFUSALS = _programs(refusals)
SAME = [
    program
    for program in _programs(collectives, reductions, messages, groups, objects, functional)
    if not any(program in table for table in (ONLY_SIM, ONLY_GLOO, BOTH_REFUSE, LEFT_OPEN))
]
