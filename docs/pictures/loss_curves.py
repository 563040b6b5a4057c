"""The runs of loss_curves.svg on real processes, and their table beside that of D. Gannon (2020).

Usage: python docs/pictures/loss_curves.py [--world gloo] [--epochs 40]; needs pip install 'pdlcheck[report]'

The function network learns sqrt(x) sin(3.14 x / 5). First 1, 2 and 4 replicas take synchronous steps. Then 4 replicas
meet only at every k-th step: they average their gradients, as the document does, or their models, which is local SGD.
There are fewer samples than in the document, x is scaled to [-1, 1], and SGD has momentum. So a run takes seconds,
where the document's runs took minutes.
"""

from __future__ import annotations

import argparse
import functools
import time
from pathlib import Path

import matplotlib
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.primitives import FunctionNet, function_samples, sync_gradients, train_local_sgd, train_synchronous
from pdlcheck.worlds import get_world

SAMPLES, BATCH, RANKS, GOAL = 2000, 100, 4, 0.05
EVERY = (1, 2, 4, 10, None)
SGD = functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9)
MSE = nn.MSELoss()
# k: seconds for 1000 epochs, loss, epochs / 1000
DOCUMENT = {1: (330, 0.039, 4), 2: (183, 0.05, 6), 4: (136, 0.04, 6), 10: (99, 0.025, 7), None: (88, 0.03, 8)}


def start() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    x, y = function_samples(SAMPLES, dtype=torch.float64)
    return FunctionNet().double(), (x / 10 - 1, y)


def synchronous(epochs: int) -> tuple[list[float], float]:
    """Return the loss of every epoch, and the seconds of one epoch."""
    model, data = start()
    begin = time.perf_counter()
    losses = train_synchronous(model, MSE, data, optimizer=SGD, epochs=epochs, global_batch=BATCH)
    return losses, (time.perf_counter() - begin) / epochs


def models_every(k: int | None, epochs: int) -> tuple[list[float], float]:
    """Train by local SGD; with ``k=None`` average the models only once, at the end."""
    model, data = start()
    begin = time.perf_counter()
    every = epochs * SAMPLES // BATCH if k is None else k
    losses = train_local_sgd(model, MSE, data, optimizer=SGD, epochs=epochs, global_batch=BATCH, sync_every=every)
    return losses, (time.perf_counter() - begin) / epochs


def gradients_every(k: int | None, epochs: int) -> tuple[list[float], float]:
    """Average the gradients at every k-th step, and never the models."""
    model, (x, y) = start()
    optimizer = SGD(model.parameters())
    losses, step, begin = [], 0, time.perf_counter()
    for epoch in range(epochs):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros(1, dtype=torch.float64)
        for batch in order.split(BATCH):
            mine = batch.tensor_split(RANKS)[dist.get_rank()]
            optimizer.zero_grad()
            loss = MSE(model(x[mine]), y[mine])
            loss.backward()
            sync_gradients(model, sync_every=k, step=step)
            optimizer.step()
            total += loss.detach() * len(mine)
            step += 1
        dist.all_reduce(total)
        losses.append(total.item() / SAMPLES)
    return losses, (time.perf_counter() - begin) / epochs


def reached(losses: list[float]) -> int | None:
    """Return the number of epochs after which the loss is below the goal."""
    return next((epoch for epoch, loss in enumerate(losses) if loss < GOAL), None)


def table(title: str, runs: dict[int | None, tuple[list[float], float]]) -> None:
    print(f"\n{title}, {RANKS} ranks; in brackets the document's: {RANKS} processes, a Core i7, 80 000 samples")
    print(f"{'every k steps':>14} {'ms an epoch':>20} {'last loss':>18} {'epochs to 0.05':>16} {'seconds to 0.05':>17}")
    for k, (losses, seconds) in runs.items():
        there_s, there_loss, there_epochs = DOCUMENT[k]
        epochs = reached(losses)
        ours = "never" if epochs is None else str(epochs)
        total = "-" if epochs is None else f"{epochs * seconds:.2f}"
        print(
            f"{k or 'never':>14} {seconds * 1e3:>12.1f} {f'({there_s})':>7} {losses[-1]:>9.5f} {f'({there_loss})':>8} "
            f"{ours:>8} {f'({there_epochs}000)':>7} {total:>8} {f'({there_s * there_epochs})':>8}"
        )


def picture(panels: dict[str, dict[str, list[float]]], path: Path) -> None:
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "pdlcheck"  # makes the bytes of the picture reproducible
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(4 * len(panels), 3.2), sharey=True, layout="constrained")
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        for width, (label, losses) in zip((6, 3.5, 1.5, 1.5, 1.5), curves.items(), strict=False):
            axis.plot(range(1, len(losses) + 1), losses, label=label, linewidth=width if "replica" in label else 1.5)
        axis.axhline(GOAL, color="grey", linewidth=0.7, linestyle=":")
        axis.set(title=title, xlabel="epoch", yscale="log")
        axis.title.set_fontsize(10)
        axis.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel("mean loss")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--world", default="gloo")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--to", type=Path, default=Path(__file__).with_suffix(".svg"))
    options = parser.parse_args()
    epochs = options.epochs
    world = get_world(options.world, **({} if options.world == "sim" else {"timeout_s": 600}))
    together = {n: world.run(synchronous, epochs, world_size=n)[0][0] for n in (1, 2, RANKS)}
    apart = max(abs(a / b - 1) for n in (2, RANKS) for a, b in zip(together[n], together[1], strict=True))
    print(f"synchronous, 1, 2 and {RANKS} replicas: losses of {epochs} epochs agree within {apart:.0e} of themselves")
    gradients = {k: world.run(gradients_every, k, epochs, world_size=RANKS)[0] for k in EVERY}
    models = {k: world.run(models_every, k, epochs, world_size=RANKS)[0] for k in EVERY}
    table("gradients synchronised", gradients)
    table("models averaged", models)
    panels = {"synchronous steps": {f"{n} replica{'s'[: n > 1]}": losses for n, losses in together.items()}}
    for title, runs in (("gradients at every k-th step", gradients), ("models at every k-th step", models)):
        panels[title] = {f"k = {k}" if k else "never": losses for k, (losses, _) in runs.items()}
    picture(panels, options.to)
    print(f"\n{options.to}")


if __name__ == "__main__":
    main()
