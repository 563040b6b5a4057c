"""A pipeline on several devices in one process."""

from __future__ import annotations

import pytest
import torch

from pdlcheck.checks import check_pipeline

from .models import MSE, samples, tanh_net, tied_net

pytestmark = pytest.mark.verifies("Pipeline")


@pytest.mark.if_subject_takes("devices", "recompute")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_several_devices_of_one_process_take_the_steps_of_one(subject, world, schedule):
    def start(model):
        pipeline = subject(model, MSE, schedule=schedule, n_microbatches=4, devices=["cpu", "cpu"], recompute=True)

        def step(inputs, targets):
            result = pipeline.step(inputs, targets)
            return result.loss, result.outputs

        return pipeline.module, step

    for make in (tanh_net, tied_net) if schedule != "interleaved" else (tanh_net,):
        check_pipeline(start, make, MSE, [samples(9), samples(4)], world, world_size=1, n_microbatches=4)


@pytest.mark.if_subject_takes("devices")
def test_slices_of_a_model_on_two_devices_need_no_process_group(subject):
    model = tanh_net()
    x, y = samples(4)
    expected = model(x)
    pipeline = subject(model, MSE, schedule="gpipe", n_microbatches=1, devices=["cpu", torch.device("cpu")])
    assert torch.equal(pipeline.infer(x).outputs, expected)
    assert pipeline.infer(x, y).loss == MSE(expected, y)


@pytest.mark.if_subject_takes("devices", "recompute")
@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_on_one_gpu_take_the_steps_of_one_process(subject, schedule):
    torch.manual_seed(0)
    model = tied_net().double().cuda()
    x, y = (t.double().cuda() for t in samples(9))
    MSE(model(x), y).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    subject(model, MSE, schedule=schedule, n_microbatches=4, devices=["cuda:0"] * 3, recompute=True).step(x, y)
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, grad, rtol=1e-9)
