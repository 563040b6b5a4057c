"""The callbacks of Lightning and transformers watch the training of a Trainer."""

from __future__ import annotations

import logging
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from pdlcheck.errors import RanksDiffer
from pdlcheck.worlds import get_world

SIM = get_world("sim")
SAMPLES = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
DIFFER = r"after step 2: rank 1 has another parameter '.*' than rank 0"


def changed(model, fault):
    """Change a weight on one rank."""
    if fault and dist.get_rank() == 1:
        with torch.no_grad():
            next(model.parameters()).add_(1)


def with_lightning(fault):
    lightning = pytest.importorskip("lightning")
    from pdlcheck.watching.lightning import WatchCallback

    class Regression(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = nn.Linear(4, 1)

        def training_step(self, batch, index):
            return self.model(batch).square().mean()

        def on_train_batch_end(self, outputs, batch, index):
            changed(self, fault and index == 0)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    callback = WatchCallback(every=1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=dist.get_world_size(),
        max_steps=3,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), DataLoader(SAMPLES, batch_size=4))
    return callback.watcher.steps


def with_transformers(fault):
    transformers = pytest.importorskip("transformers")
    from pdlcheck.watching.transformers import WatchCallback

    class Broken(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model, **objects):
            changed(model, fault and state.global_step == 1)

    torch.manual_seed(0)
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=2, **sizes))
    tokens = torch.arange(96).reshape(24, 4) % 8
    samples = [{"input_ids": one, "labels": one} for one in tokens]
    callback = WatchCallback(every=1)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            max_steps=3,
            per_device_train_batch_size=4,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=samples, callbacks=[Broken(), callback])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return callback.watcher.steps


TRAINERS = {"lightning": with_lightning, "transformers": with_transformers}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRAINERS)
def test_a_callback_watches(name):
    pytest.importorskip(name, reason=f"the callback needs {name}: pip install {name}")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    assert SIM.run(TRAINERS[name], False, world_size=2) == [3, 3]
    with pytest.raises(RanksDiffer, match=DIFFER):
        SIM.run(TRAINERS[name], True, world_size=2)
