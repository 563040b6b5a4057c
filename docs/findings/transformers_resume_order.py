"""transformers 5.24.0: batch_rebalance goes on in the first epoch's order if it resumes within a later epoch.

torchrun --nproc-per-node 2 transformers_resume_order.py    # plain gloo
python transformers_resume_order.py                         # check_shards on the simulated cluster: fails
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from pdlcheck.checks import check_shards
from pdlcheck.worlds import get_world


class Samples(Dataset):
    """Samples of one length, so that all batches have two; each consists of its own index."""

    def __init__(self, number):
        self.number = number

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        return {"input_ids": torch.tensor([range(self.number)[index]])}  # raises IndexError at the end


class Net(nn.Module):
    """A model that keeps the samples that it was trained on."""

    def __init__(self):
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.zeros(1)), []

    def forward(self, samples):
        self.seen += samples.tolist()
        return {"loss": (self.weight - samples.cos()).square().mean()}


def first_tokens(samples):
    return {"samples": torch.stack([sample["input_ids"][0] for sample in samples])}


def trained_on(num_samples, folder, steps, strategy, resume=None):
    """Train up to a number of steps in all, and return the samples that were used."""
    model = Net()
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=2,
        train_sampling_strategy=strategy,
        save_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Trainer(model, arguments, train_dataset=Samples(num_samples), data_collator=first_tokens)
    trainer.train(resume_from_checkpoint=resume)
    return model.seen


def resumed_epoch(num_samples, *, rank, world_size, epoch, strategy="batch_rebalance", stops=True):
    """Return the samples of an epoch; with ``stops``, the training is resumed after the first step of that epoch."""
    folder = [tempfile.mkdtemp()]
    if dist.is_initialized():
        dist.broadcast_object_list(folder)
    steps, used = num_samples // world_size // 2, num_samples // world_size
    if not stops:
        return trained_on(num_samples, folder[0], (epoch + 1) * steps, strategy)[-used:]
    before = trained_on(num_samples, folder[0], epoch * steps + 1, strategy)[-2:]
    checkpoint = os.path.join(folder[0], f"checkpoint-{epoch * steps + 1}")
    return before + trained_on(num_samples, folder[0], (epoch + 1) * steps, strategy, checkpoint)


def check(shards=resumed_epoch, **more):
    """Check that the ranks together visit all samples of the second epoch once."""
    check_shards(shards, get_world("sim"), **{"num_samples": 24, "world_size": 2, "epoch": 1} | more)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        check()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for options in ({"stops": False}, {}, {"strategy": "random"}):
        used = resumed_epoch(24, rank=rank, world_size=world_size, epoch=1, **options)
        print(f"rank {rank} {options}: {used}", flush=True)
        dist.barrier()
    dist.destroy_process_group()
