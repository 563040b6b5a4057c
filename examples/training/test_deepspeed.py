"""A script with DeepSpeed, ZeRO stage 1: pytest examples/training/test_deepspeed.py."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_training

deepspeed = pytest.importorskip("deepspeed", reason="the example needs DeepSpeed: pip install deepspeed ninja")
pytest.importorskip(
    "deepspeed.comm.torch"
).build_shm_op()  # compiles DeepSpeed's operation for CPUs, a minute in the first run
torch.manual_seed(0)
BATCHES = [(torch.randn(12, 4), torch.randn(12, 1)) for _ in range(3)]


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    torch.manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
    return model


def wrap(model):
    config = {
        "train_micro_batch_size_per_gpu": 12 // dist.get_world_size(),
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # clipping hides a factor of the gradients
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine, optimizer


def step(engine, optimizer, batch, scale=1.0):
    inputs, targets = batch
    engine.backward(nn.functional.mse_loss(engine(inputs), targets) * scale)
    engine.step()


PARTS = {"batches": BATCHES, "wrap": wrap, "dtype": torch.float32}


def test_training(world):
    print(check_training(make, world, **PARTS, step=step))


def test_a_loss_that_is_multiplied_by_the_number_of_ranks_is_found(world):
    def scaled(engine, optimizer, batch):
        step(engine, optimizer, batch, scale=dist.get_world_size())

    with pytest.raises(AssertionError, match=r"check_world_size_does_not_matter +wrong"):
        check_training(make, world, **PARTS, step=scaled)
