"""A script with transformers.Trainer: pytest examples/training/test_transformers_trainer.py."""

import tempfile

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import SequentialSampler

from pdlcheck.checks import check_training

transformers = pytest.importorskip("transformers", reason="the example needs transformers: pip install transformers")
pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate: pip install accelerate")
torch.manual_seed(0)
TOKENS = torch.randint(0, 32, (48, 8))
LENGTHS = torch.randint(2, 9, (48, 1))  # padded sequences: ranks have different numbers of tokens
LABELS = TOKENS.where(torch.arange(8) < LENGTHS, -100)
SAMPLES = [{"input_ids": tokens, "labels": labels} for tokens, labels in zip(TOKENS, LABELS, strict=True)]


def make():
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=2, **sizes))


class InOrder(transformers.Trainer):
    def _get_train_sampler(self, dataset=None):
        return SequentialSampler(self.train_dataset)


def train(model, steps, **options):
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=12 // dist.get_world_size(),
            optim="sgd",
            learning_rate=0.1,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
            **options,
        )
        trainer = InOrder(model, arguments, train_dataset=SAMPLES)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()


def plainly(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for tokens, labels in list(zip(TOKENS.split(12), LABELS.split(12), strict=True))[:steps]:
        optimizer.zero_grad()
        model(input_ids=tokens, labels=labels).loss.backward()
        optimizer.step()


def test_training(world):
    print(check_training(make, world, train=train, reference=plainly, dtype=torch.float32))  # its loss is in float32


def test_a_mean_of_means_over_tokens_is_found(world):
    def averages(model, steps):
        train(model, steps, average_tokens_across_devices=False)

    with pytest.raises(AssertionError, match=r"check_same_trajectory +wrong"):
        check_training(make, world, train=averages, reference=plainly, dtype=torch.float32)
