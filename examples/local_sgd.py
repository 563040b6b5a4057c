"""Local SGD: every rank steps alone, and the models are averaged at every k-th step; the task is to fit a function.

    torchrun --nproc-per-node 4 examples/local_sgd.py --sync-every 10 --plot fit.svg

The ranks have unequal numbers of samples, and so unequal numbers of steps. At the end of the ``with`` block, ranks that
are done take part in the others' averages until all are done. Without matplotlib (pip install 'pdlcheck[report]') the
plot is text.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdlcheck.primitives import FunctionNet, LocalSGD, function_samples


def train(model: nn.Module, data: tuple[Tensor, Tensor], epochs: int, sync_every: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shares = torch.arange(1, world_size + 1) + world_size  # the last rank has almost twice as many samples as the first
    cuts = (shares.cumsum(0)[:-1] * len(data[0]) // shares.sum()).tolist()
    order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(0)).tensor_split(cuts)[rank]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    local = LocalSGD(optimizer, model, sync_every=sync_every, momentum="average")
    for _ in range(epochs):
        with local:
            for batch in order.split(25):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(data[0][batch]), data[1][batch]).backward()
                local.step()


def plot(x: Tensor, target: Tensor, fit: Tensor, path: str | None) -> None:
    if path is None or find_spec("matplotlib") is None:
        for position in range(0, len(x), len(x) // 20):
            line = [" "] * 61
            for mark, value in (("o", fit), ("x", target)):
                line[min(max(round(30 + 6 * value[position].item()), 0), 60)] = mark
            print(f"{x[position].item():5.1f} |{''.join(line).rstrip()}")
        return
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    pyplot.plot(x, target, linewidth=4, alpha=0.4, label="sqrt(x) sin(3.14 x / 5)")
    pyplot.plot(x, fit, label="the network")
    pyplot.legend()
    pyplot.savefig(path)
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--sync-every", type=int, default=10)
    parser.add_argument("--plot", help="a file for the plot of the fit, .png or .svg")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    x, target = function_samples(2000)
    inputs = x / 10 - 1  # the network learns faster from numbers around 0
    model = FunctionNet()
    train(model, (inputs, target), options.epochs, options.sync_every)
    with torch.no_grad():
        fit = model(inputs)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, mean squared error {nn.functional.mse_loss(fit, target).item():.4f}")
        plot(x, target, fit, options.plot)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
