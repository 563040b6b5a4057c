"""The time that a trace takes, beside the steps that it records."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import pdlcheck

STEPS = 3


def seconds(folder=None) -> float:
    """Return the processor time of three steps, and of their trace if there is a folder for it."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    samples = torch.randn(8, 64, 128)

    def train() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(samples).square().mean().backward()
            optimizer.step()

    start = time.process_time()
    if folder is None:
        train()
    else:
        with pdlcheck.trace(model, optimizer, folder, steps=STEPS):
            train()
    return time.process_time() - start


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow  # it measures time
@pytest.mark.usefixtures("one_thread")
def test_a_trace_of_three_steps_takes_less_than_three_times_those_steps(tmp_path):
    seconds()
    pairs = [(seconds(), seconds(tmp_path)) for _ in range(5)]  # in turns
    alone, traced = (min(one) for one in zip(*pairs, strict=True))
    assert traced < 3 * alone, f"{traced:.3f} s beside {alone:.3f} s"
