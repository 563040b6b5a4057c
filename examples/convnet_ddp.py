"""ConvNet on scikit-learn's digits with DistributedDataParallel, mixed precision and checkpoints that resume exactly.

    torchrun --nproc-per-node 2 examples/convnet_ddp.py

On two machines that share the folder of the checkpoints, give each its own --node-rank:

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr HOST --master-port 29500 examples/convnet_ddp.py

The table at the end shows the SHA-256 of the data that each rank loaded. It marks a digest that two ranks share.
"""

import argparse
import os

import torch
import torch.distributed as dist
from joining import process_group, say
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pdlcheck.primitives import ConvNet, DistributedDataParallel, DistributedGradScaler, ShardSampler
from pdlcheck.primitives.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from pdlcheck.primitives.data import gather_shard_digests, shard_digest, shard_digest_table
from pdlcheck.primitives.digits import digits


def train(options: argparse.Namespace, device: torch.device, loaded: dict[str, list[torch.Tensor]]) -> nn.Module:
    torch.manual_seed(0)
    data, half = TensorDataset(*digits()), getattr(torch, options.half)
    model, sampler = DistributedDataParallel(ConvNet().to(device)), ShardSampler(data)
    loader = DataLoader(data, 100 // dist.get_world_size(), sampler=sampler, generator=torch.Generator())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = DistributedGradScaler(device.type, enabled=half == torch.float16)  # bfloat16 needs no loss scaling
    parts = {"model": model.module, "optimizer": optimizer, "scaler": scaler, "sampler": sampler}
    newest, taken = latest_checkpoint(options.checkpoints), 0
    if newest is not None:
        taken = load_checkpoint(newest, **parts)
    for epoch in range(sampler.epoch, options.epochs):
        sampler.set_epoch(epoch)
        for step, (images, labels) in enumerate(loader):
            loaded.setdefault(f"epoch {epoch}", []).extend([images, labels])
            optimizer.zero_grad()
            with torch.autocast(device.type, half):
                loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            scaler.scale(loss).backward()
            scaler.clip_grad_norm_(optimizer, max_norm=2.0)
            scaler.step(optimizer)
            scaler.update()
            sampler.commit(len(labels))
            taken += 1
            if taken == options.stop:
                save_checkpoint(options.checkpoints, taken, **parts)
                return model.module
            say(f"epoch {epoch}, step {step}: loss {loss.item():.3f}, scale {scaler.get_scale():g}")
        save_checkpoint(options.checkpoints, taken, **parts)
    return model.module


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--checkpoints", default="convnet", metavar="FOLDER", help="one after every epoch")
    parser.add_argument("--stop", type=int, metavar="STEPS", help="save and end after so many steps")
    gpus = torch.cuda.device_count()
    parser.add_argument("--half", choices=["float16", "bfloat16"], default="float16" if gpus else "bfloat16")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % gpus) if gpus else torch.device("cpu")
    with process_group():
        loaded: dict[str, list[torch.Tensor]] = {}
        model = train(options, device, loaded).eval()
        images, labels = digits(train=False)
        right = (model(images.to(device)).argmax(1).cpu() == labels).double().mean().item()
        if loaded:  # loaded by this call
            say(shard_digest_table({epoch: gather_shard_digests(batches) for epoch, batches in loaded.items()}))
        say(f"{right:.1%} read right, weights {shard_digest(model.state_dict().values())[:16]}")
