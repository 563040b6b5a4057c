"""When results are copied into a tensor, its version increases: autograd refuses to use its saved value."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pdlcheck.worlds import get_world


def outputs_that_autograd_has_saved():
    """Return for each call whether it makes a backward pass raise that needs the outputs' old values."""
    told = {}

    def overwrite(name, call, *outputs):
        weight = torch.ones(1, requires_grad=True)
        loss = sum((weight * output).sum() for output in outputs)
        call()
        try:
            loss.backward()
        except RuntimeError as error:
            told[name] = "modified by an inplace operation" in str(error)
        else:
            told[name] = False

    def coalesced():
        with dist._coalescing_manager():
            for output in outputs:
                dist.all_reduce(output)

    rank, x, flat = dist.get_rank(), torch.zeros(2), torch.zeros(8)
    outputs = [torch.zeros(2) for _ in range(4)]
    inputs = [torch.ones(2) for _ in range(4)]
    overwrite("all_reduce", lambda: dist.all_reduce(x), x)
    overwrite("broadcast", lambda: dist.broadcast(x, 1), x)
    overwrite("all_gather", lambda: dist.all_gather(outputs, inputs[0]), *outputs)
    overwrite("flat all_gather", lambda: dist.all_gather_into_tensor(flat, inputs[0]), flat)
    overwrite("gather", lambda: dist.gather(inputs[0], outputs if rank == 2 else None, 2), *outputs)
    overwrite("scatter", lambda: dist.scatter(x, inputs if rank == 2 else None, 2), x)
    overwrite("reduce_scatter", lambda: dist.reduce_scatter(x, inputs), x)
    overwrite("flat reduce_scatter", lambda: dist.reduce_scatter_tensor(x, torch.ones(8)), x)
    overwrite("all_to_all", lambda: dist.all_to_all_single(flat, torch.ones(8)), flat)
    overwrite("coalesced", coalesced, *outputs)
    return told


@pytest.mark.filterwarnings("ignore::FutureWarning")  # about renamed names
def test_autograd_sees_what_it_sees_on_gloo():
    simulated, real = (get_world(name).run(outputs_that_autograd_has_saved, world_size=4) for name in ("sim", "gloo"))
    assert simulated == real
    assert [name for name, raised in simulated[2].items() if raised] == [
        *("all_gather", "flat all_gather", "gather", "reduce_scatter", "flat reduce_scatter", "coalesced"),
    ]
