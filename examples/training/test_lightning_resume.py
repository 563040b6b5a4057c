"""A run of Lightning's Trainer that stops and resumes: pytest examples/training/test_lightning_resume.py."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pdlcheck.checks import check_resumed_run

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
lightning = pytest.importorskip("lightning", reason="the example needs Lightning: pip install lightning")
GENERATOR = torch.Generator().manual_seed(0)
DATA = TensorDataset(torch.randn(24, 4, generator=GENERATOR), torch.randn(24, 1, generator=GENERATOR))


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.losses = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)), []

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


class Loader(DataLoader):
    position = 0  # Lightning saves and loads it

    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            if number >= self.position:
                self.position = number + 1
                yield batch
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class StopAndSave(lightning.Callback):
    def __init__(self, stop_after, file):
        self.stop_after, self.file = stop_after, file

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.stop_after:
            trainer.save_checkpoint(self.file)
            trainer.should_stop = True


def run(folder, stop_after, make_loader=Loader):
    torch.manual_seed(0)
    module, file = Regression(), folder / "last.ckpt"
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=dist.get_world_size(),
        max_steps=6,  # with a stop, too
        callbacks=[StopAndSave(stop_after, file)],
        use_distributed_sampler=False,  # its own one shuffles
        **dict.fromkeys(["enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"], False),
    )
    sampler = DistributedSampler(DATA, dist.get_world_size(), dist.get_rank(), shuffle=False)
    loader = make_loader(DATA, batch_size=8 // dist.get_world_size(), sampler=sampler)
    trainer.fit(module, loader, ckpt_path=file if file.exists() else None)
    return {"model": module.model, "optimizer": trainer.optimizers[0], "losses": module.losses}


def test_resumed(world):
    check_resumed_run(run, world, stop_after=2)  # within an epoch of three batches


def test_a_loader_without_a_state_is_found(world):
    def begins_the_epoch_anew(folder, stop_after):
        return run(folder, stop_after, make_loader=DataLoader)

    with pytest.raises(AssertionError, match="in step 3, the model is given the data of step 1"):
        check_resumed_run(begins_the_epoch_anew, world, stop_after=2)
