"""Synchronous SGD on real input: LeNet learns handwritten digits on 1, 2 and 4 simulated replicas."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from pdlcheck.primitives import LeNet, train_synchronous
from pdlcheck.report.records import ReplicaRun, ReplicaTraining
from pdlcheck.worlds import get_world

__all__ = ["train_replicas"]

EPOCHS, GLOBAL_BATCH, LR, MOMENTUM = 20, 60, 0.1, 0.9
# Each number of replicas adds the gradients of a batch in a different order. In float64 this changes a weight by
# about 1e-16 in a step. A sample that is counted twice or left out changes it by more than 1e-6 at once.
ALLOWED = 1e-9


def train_replicas(numbers: Sequence[int] = (1, 2, 4)) -> ReplicaTraining:
    """Train the same network from the same weights on each number of replicas.

    Args:
        numbers: the numbers of replicas; the first one is 1, because the others are compared with it.

    Raises:
        ImportError: scikit-learn, which contains the digits, is missing; the message names the extra.
    """
    from pdlcheck.primitives.digits import digits  # scikit-learn is optional

    train, test = digits(dtype=torch.float64), digits(train=False, dtype=torch.float64)
    runs: list[ReplicaRun] = []
    alone: Tensor | None = None
    world = get_world("sim")
    try:
        for replicas in numbers:
            start = time.perf_counter()
            results = world.run(_train, train, test, world_size=replicas)
            weights, loss, accuracy = results[0]
            alone = weights if alone is None else alone
            runs.append(
                ReplicaRun(
                    replicas,
                    loss,
                    accuracy,
                    difference=float((weights - alone).abs().max()),
                    bitwise_equal=all(torch.equal(other, weights) for other, _, _ in results),
                    seconds=time.perf_counter() - start,
                )
            )
    finally:
        world.close()
    setting = (
        f"{len(train[0])} images to learn from, {len(test[0])} to test with, float64, {EPOCHS} epochs\n"
        f"of SGD, lr {LR}, momentum {MOMENTUM}, batches of {GLOBAL_BATCH} over all replicas, simulated ranks"
    )
    return ReplicaTraining(setting, tuple(runs), ALLOWED)


def _train(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> tuple[Tensor, float, float]:
    """Train on every rank; return its weights as one vector, the loss of the last epoch, and the test accuracy."""
    torch.manual_seed(0)
    model = LeNet().double()
    losses = train_synchronous(
        model,
        nn.CrossEntropyLoss(),
        train,
        optimizer=partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM),
        epochs=EPOCHS,
        global_batch=GLOBAL_BATCH,
    )
    with torch.no_grad():
        right = (model(test[0]).argmax(1) == test[1]).double().mean()
        return nn.utils.parameters_to_vector(model.parameters()), losses[-1], float(right)
