"""Bad input of a pipeline gives the same error on every rank, and no rank waits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pdlcheck.primitives.pipeline import gpipe

from .models import MSE, SGD, errors, samples, side_by_side, tanh_net, tied_net

pytestmark = pytest.mark.verifies("Pipeline")


@pytest.mark.beyond_contract("error messages")
def test_a_batch_smaller_than_its_micro_batches_is_refused_on_every_rank(subject, world):
    def program(rank):
        pipeline = subject(tanh_net(), MSE, n_microbatches=4)
        pipeline.step(*samples(4))
        x, y = samples(3)
        pipeline.step(x if rank == 0 else None, y if rank == 2 else None)

    found = errors(world, program, 3)
    assert len(set(found)) == 1
    assert found[0].startswith("ValueError: Pipeline got inputs of 3 samples for n_microbatches=4; give it a larger")


@pytest.mark.beyond_contract("error messages")
def test_a_pipeline_goes_on_after_a_step_that_was_refused(subject, world):
    def program():
        torch.manual_seed(0)
        pipeline = subject(tanh_net(), MSE, n_microbatches=2)
        pipeline.step(*samples(4))
        first = [p.grad.clone() for p in pipeline.module.parameters()]
        pipeline.module.zero_grad()
        x, y = samples(4)
        for inputs, targets in ((x, y[:3]), (x[:1], y[:1]), (x, None), (None, y)):
            with pytest.raises(ValueError, match="Pipeline"):
                pipeline.step(inputs, targets)
        assert all(p.grad is None for p in pipeline.module.parameters())
        assert not any(stage.live for stage in pipeline._built.stages.values())
        pipeline.step(x, y)
        return all(torch.equal(p.grad, grad) for p, grad in zip(pipeline.module.parameters(), first, strict=True))

    assert world.run(program, world_size=2) == [True, True]


def words_of_torch():
    """Return the first words of torch's message; a newer release puts more words before it."""
    with pytest.raises(RuntimeError) as raised:
        nn.Linear(2, 1)(torch.ones(1, 3))
    return str(raised.value).partition(" cannot")[0]


MAT1 = words_of_torch()


class Named(nn.Linear):
    def forward(self, x):
        return {"hidden": super().forward(x)}


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 3)),
            "ValueError: stage 1 cannot take what stage 0 returns, float32 (2, 4): RuntimeError: " + MAT1,
        ),
        (
            lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)),
            "ValueError: stage 0 cannot take the inputs, float32 (2, 3): RuntimeError: " + MAT1,
        ),
        (
            lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double()),
            "ValueError: stage 1 cannot take what stage 0 returns, float32 (2, 3): RuntimeError: mat1 and mat2 must",
        ),
        (
            lambda: nn.Sequential(nn.LSTM(3, 3), nn.Linear(3, 3)),
            "ValueError: stage 0 cannot take the inputs, float32 (2, 3): TypeError: stage 0 returns tuple; what goes",
        ),
        (
            lambda: nn.Sequential(Named(3, 3), nn.Linear(3, 3)),
            "ValueError: stage 0 cannot take the inputs, float32 (2, 3): TypeError: stage 0 returns dict; what goes "
            "from stage to stage is a tensor or a tuple of them, such as tuple(found.values()) of a dict",
        ),
    ],
    ids=["shape", "inputs", "dtype", "nested", "dict"],
)
def test_stages_that_do_not_fit_are_refused_on_every_rank(subject, world, model, message):
    found = errors(world, lambda rank: subject(model(), MSE, n_microbatches=2).step(*samples(4)))
    assert len(set(found)) == 1
    assert found[0].startswith(message)


@pytest.mark.beyond_contract("error messages")
def test_targets_and_inputs_of_unequal_number_are_refused_on_every_rank(subject, world):
    def program(rank):
        x, y = samples(6)
        subject(tanh_net(), MSE, n_microbatches=2).step(x if rank == 0 else None, y[:5] if rank else None)

    assert (
        errors(world, program)
        == ["ValueError: Pipeline needs a target for every input, got batches of 5 and 6 samples"] * 2
    )


def squared_error(out, targets):
    return (out - targets).pow(2).mean()


@pytest.mark.beyond_contract("error messages")
def test_targets_that_do_not_fit_are_refused_on_every_rank_in_later_steps_too(subject, world):
    def program(rank):
        pipeline = subject(tanh_net(), squared_error, n_microbatches=2)
        x, y = samples(4)
        pipeline.step(x, y)
        pipeline.step(x, torch.zeros(4, 5))

    found = errors(world, program)
    assert len(set(found)) == 1
    assert found[0].startswith("ValueError: stage 1 cannot take what stage 0 returns, float32 (2, 3): RuntimeError: ")


@pytest.mark.beyond_contract("error messages")
def test_a_loss_that_infer_did_not_need_is_refused_on_every_rank(subject, world):
    def program(rank):
        pipeline = subject(tanh_net(), nn.PairwiseDistance(), n_microbatches=2)
        x, y = samples(4)
        pipeline.infer(x)
        pipeline.step(x, y)

    found = errors(world, program)
    assert len(set(found)) == 1
    assert found[0].startswith("ValueError: Pipeline got a tensor of shape (2,) from loss")


@pytest.mark.beyond_contract("error messages")
def test_inputs_that_were_refused_are_refused_again(subject, world):
    def program(rank):
        pipeline = subject(tanh_net(), MSE, n_microbatches=2)
        x, y = samples(4)
        pipeline.step(x, y)
        with pytest.raises(ValueError, match="stage 0 cannot take the inputs"):
            pipeline.step(x[:, :2], y)
        pipeline.step(x[:, :2], y)

    found = errors(world, program)
    assert len(set(found)) == 1
    assert found[0].startswith("ValueError: stage 0 cannot take the inputs, float32 (2, 2): RuntimeError: " + MAT1)


@pytest.mark.beyond_contract("error messages")
def test_a_weight_that_cannot_be_had_is_refused_on_every_rank(subject, world):
    weight = lambda part: {}["count"]  # noqa: E731
    found = errors(world, lambda rank: subject(tanh_net(), MSE, n_microbatches=2, loss_weight=weight).step(*samples(4)))
    assert found == ["ValueError: Pipeline needs a number from loss_weight, and got KeyError: 'count'"] * 2


@pytest.mark.beyond_contract("error messages")
def test_inputs_that_only_one_pipeline_cannot_take_are_refused_on_every_rank(subject, world):
    def program(rank):
        pipeline = subject(tanh_net(), MSE, n_microbatches=2, **side_by_side(rank))
        pipeline.step(*samples(4))
        x, y = samples(4)
        pipeline.step(x[:, :2] if rank > 1 else x, y)

    found = errors(world, program, 4)
    assert len(set(found)) == 1
    assert found[0].startswith("ValueError: stage 0 cannot take the inputs, float32 (2, 2): RuntimeError: " + MAT1)


def test_an_error_in_one_pipeline_reaches_the_ranks_of_the_other(subject, world):
    def program(rank):
        pipeline = subject(tanh_net(), MSE, n_microbatches=2, **side_by_side(rank))
        pipeline.step(*samples(4 if rank < 2 else 1))

    found = errors(world, program, 4)
    assert len(set(found)) == 1
    assert "inputs of 1 samples for n_microbatches=2" in found[0]


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"n_microbatches": 0}, "ValueError: one_f_one_b needs n_microbatches of at least 1, got n_microbatches=0"),
        ({}, "ValueError: Pipeline needs n_microbatches with schedule='1f1b'"),
        ({"n_microbatches": 2, "schedule": "2f2b"}, "ValueError: Pipeline knows schedule '1f1b', 'gpipe'"),
        ({"schedule": gpipe(3, 2)}, "ValueError: Pipeline got a schedule for 3 ranks, the pipeline has 2"),
        ({"schedule": gpipe(2, 2), "n_microbatches": 3}, "ValueError: Pipeline got n_microbatches=3 and a schedule"),
        ({"schedule": "interleaved", "n_microbatches": 3}, "ValueError: interleaved_1f1b needs n_microbatches to be a"),
        ({"stages_per_rank": 2, "n_microbatches": 3}, "ValueError: Pipeline takes stages_per_rank with"),
        ({"schedule": "pipedream", "n_microbatches": 2}, "ValueError: Pipeline needs optimizer with pipedream"),
        ({"optimizer": SGD, "n_microbatches": 2}, "ValueError: Pipeline takes optimizer and vertical_sync with"),
        (
            {"reduction": "none", "n_microbatches": 2},
            "ValueError: Pipeline knows reduction 'mean' and 'sum', got 'none'",
        ),
        ({"reduction": "sum", "n_microbatches": 2}, "ValueError: Pipeline got reduction='sum' for a loss that has"),
        ({"split": "weight", "n_microbatches": 2}, "ValueError: split_model knows by='layers', 'parameters', 'time'"),
        ({"split": [9], "n_microbatches": 2}, "ValueError: split_model got positions [9] for 2 stages of 4 layers"),
        ({"split": "time", "n_microbatches": 2}, "ValueError: split_model needs sample"),
        ({"split": "time", "sample": samples(2)[0]}, "ValueError: Pipeline needs n_microbatches with schedule='1f1b'"),
        (
            {"split": "time", "sample": samples(2, width=5)[0], "n_microbatches": 2},
            f"RuntimeError: {MAT1} cannot be multiplied (2x5 and 3x3)",
        ),
        ({"split": "time", "sample": [1.0], "n_microbatches": 2}, "RuntimeError: AttributeError: 'float' object has"),
        (
            {"split": [3], "n_microbatches": 2},
            "ValueError: split_model: stage 1 has no parameters, its layers are 3 (Tanh)",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value) or "nothing",
)
def test_a_pipeline_refuses(subject, world, keywords, message):
    found = errors(world, lambda rank: subject(tanh_net(2), MSE, **keywords))
    assert len(set(found)) == 1
    assert found[0].startswith(message)


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize(
    ("model", "loss", "message"),
    [
        (tanh_net(1), MSE, "ValueError: split_model got n_stages=3 for 2 layers; take at most 2"),
        (tanh_net(2), MSE, "ValueError: split_model got n_stages=3, but only 2 of 4 layers have parameters"),
        (nn.Linear(2, 2), MSE, "TypeError: a pipeline takes an nn.Sequential, got Linear"),
        (nn.Sequential(), MSE, "ValueError: a pipeline needs layers, got an empty nn.Sequential"),
        (tanh_net(3), "mse", "TypeError: Pipeline takes loss as a function of outputs and targets, got str"),
    ],
    ids=["layers", "parameters", "linear", "empty", "loss"],
)
def test_a_pipeline_refuses_models_that_it_cannot_cut(subject, world, model, loss, message):
    found = errors(world, lambda rank: subject(model, loss, n_microbatches=2), 3)
    assert len(set(found)) == 1
    assert found[0].startswith(message)


@pytest.mark.beyond_contract("error messages")
def test_tied_stages_are_refused_under_pipedream(subject, world):
    found = errors(world, lambda rank: subject(tied_net(), MSE, schedule="pipedream", n_microbatches=2, optimizer=SGD))
    assert len(set(found)) == 1
    assert found[0].startswith("ValueError: Pipeline cannot keep '0.weight' tied under pipedream: its stages take")


@pytest.mark.beyond_contract("error messages")
def test_ranks_with_other_arguments_are_refused_on_every_rank(subject, world):
    found = errors(world, lambda rank: subject(tanh_net(), MSE, n_microbatches=2 + rank))
    assert len(set(found)) == 1
    assert found[0].startswith("ValueError: Pipeline was made otherwise on rank 1 of its group than on rank 0")


@pytest.mark.beyond_contract("error messages")
def test_a_split_that_ranks_want_otherwise_is_refused_on_every_rank(subject, world):
    def program(rank):
        x, _ = samples(2)
        subject(tanh_net(), MSE, n_microbatches=2, split="parameters" if rank else "time", sample=x)

    found = errors(world, program)
    assert len(set(found)) == 1
    assert found[0].startswith("ValueError: Pipeline was made otherwise on rank 1 of its group than on rank 0")


@pytest.mark.beyond_contract("error messages")
def test_a_device_that_one_rank_cannot_take_is_refused_on_every_rank(subject, world):
    found = errors(world, lambda rank: subject(tanh_net(), MSE, n_microbatches=2, device="nowhere" if rank else None))
    assert len(set(found)) == 1
    assert found[0].startswith("RuntimeError: Expected one of cpu, cuda")


@pytest.mark.beyond_contract("error messages")
def test_pipelines_with_other_arguments_are_refused_on_every_rank(subject, world):
    def program(rank):
        loss = nn.MSELoss(reduction="sum" if rank > 1 else "mean")
        subject(tanh_net(), loss, n_microbatches=2, **side_by_side(rank))

    found = errors(world, program, 4)
    assert len(set(found)) == 1
    assert found[0].startswith(
        "ValueError: Pipeline was made otherwise on rank 0 of its group in pipeline 1 of its data_group than on rank 0 "
        "in pipeline 0; give every rank the same model and arguments"
    )


def test_a_pipeline_that_cannot_be_made_reaches_the_ranks_of_the_other(subject, world):
    def program(rank):
        subject(tanh_net(), MSE, n_microbatches=2 if rank < 2 else None, **side_by_side(rank))

    assert errors(world, program, 4) == ["ValueError: Pipeline needs n_microbatches with schedule='1f1b'"] * 4


@pytest.mark.beyond_contract("error messages")
def test_a_step_without_a_loss_is_refused(subject, world):
    found = errors(world, lambda rank: subject(tanh_net(), n_microbatches=2).step(*samples(4)))
    assert found == ["ValueError: Pipeline needs a loss for this: give it one, or call infer without targets"] * 2


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda out, targets: (out - targets).pow(2).mean(1), "a tensor of shape (2,)"),
        (lambda out, targets: (out - targets).pow(2).mean().item(), "float"),
    ],
    ids=["of each sample", "no tensor"],
)
def test_a_loss_that_is_not_one_number_is_refused_on_every_rank(subject, world, loss, got):
    found = errors(world, lambda rank: subject(tanh_net(), loss, n_microbatches=2).step(*samples(4)))
    assert len(set(found)) == 1
    assert found[0].startswith(f"ValueError: Pipeline got {got} from loss, and a loss must be one number")


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize("first", ["eager", "new"])
@pytest.mark.parametrize("rank_that_infers", [0, 1, 2])
def test_step_on_some_ranks_and_infer_on_others_is_refused_on_every_rank(subject, world, rank_that_infers, first):
    """Regression test: one rank waited for gradients that the other never sent."""

    def program(rank):
        pipeline = subject(tanh_net(), MSE, n_microbatches=2)
        if first == "eager":
            pipeline.step(*samples(4))
        (pipeline.infer if rank == rank_that_infers else pipeline.step)(*samples(4))

    found = errors(world, program, 3)
    assert len(set(found)) == 1
    others = ", ".join(str(rank) for rank in range(3) if rank != rank_that_infers)
    assert found[0].startswith(
        f"ValueError: Pipeline.step was called on rank {others} of its group and infer on rank {rank_that_infers}; call"
    )


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_infer_on_one_rank_of_two_pipelines_is_refused_on_every_rank(subject, world, schedule):
    def program(rank):
        keywords = {"optimizer": SGD} if schedule == "pipedream" else {}
        pipeline = subject(tanh_net(), MSE, schedule=schedule, n_microbatches=2, **keywords, **side_by_side(rank))
        pipeline.step(*samples(4))
        (pipeline.infer if rank == 3 else pipeline.step)(*samples(4))

    found = errors(world, program, 4)
    assert len(set(found)) == 1
    assert found[0].startswith("ValueError: Pipeline.step was called on rank 0 of its group and infer on rank 1; call")


def accuracy(out, targets):
    return (out.argmax(1) == targets.argmax(1)).double().mean()


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize("where", [[0], [1], [0, 1]], ids=["first", "last", "all"])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_step_in_inference_mode_is_refused_on_every_rank(subject, world, where, step):
    """Regression test: in inference mode no tensor has a graph, so that rank got no gradients, without an error."""

    def program(rank):
        pipeline = subject(tanh_net(), MSE, schedule="gpipe", n_microbatches=2)
        x, y = samples(8)
        for _ in range(step):
            pipeline.step(x, y)
        pipeline.module.zero_grad()
        with (
            pytest.raises(ValueError, match=r"Pipeline\.step makes no gradients in torch\.inference_mode") as caught,
            torch.inference_mode(rank in where),
        ):
            pipeline.step(x, y)
        for _ in range(2):
            with torch.no_grad():
                pipeline.step(x, y)
        assert all(p.grad is not None and p.grad.any() for p in pipeline.module.parameters())
        with torch.inference_mode():
            pipeline.infer(x, y)
        raise caught.value

    found = errors(world, program)
    assert len(set(found)) == 1
    assert "Pipeline.step makes no gradients in torch.inference_mode" in found[0]


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_a_loss_without_a_gradient_is_refused_on_every_rank(subject, world, recompute):
    """A single process raises in the first step; regression test: the pipeline trained nothing and raised no error."""

    def program(rank):
        pipeline = subject(tanh_net(), accuracy, n_microbatches=2, recompute=recompute)
        pipeline.infer(*samples(4))
        pipeline.step(*samples(4))
        assert all(p.grad is None for p in pipeline.module.parameters())
        pipeline.infer(*samples(4))
        pipeline.step(*samples(4))

    found = errors(world, program)
    assert len(set(found)) == 1
    assert found[0].startswith("ValueError: Pipeline got a loss without a gradient in the step before, so that no")


def test_a_batch_may_have_nothing_to_learn_from(subject, world):
    """A loss of pairs without any pair is an example; after one gradient the loss is known to have one."""

    def sometimes(out, targets):
        return averaged(out, targets) if targets.max() < 100 else torch.zeros(())

    def program(rank):
        pipeline = subject(tanh_net(), sometimes, n_microbatches=2)
        x, y = samples(4)
        for targets in (y, y + 1000, y, y):
            pipeline.step(x, targets)

    assert errors(world, program) == ["nothing"] * 2


def added(out, targets):
    return (out - targets).pow(2).sum()


def averaged(out, targets):
    return (out - targets).pow(2).mean()


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize("n_samples", [4, 7])
def test_a_loss_that_adds_and_does_not_say_so_is_refused_on_every_rank(subject, world, n_samples):
    """Regression test: the losses of its micro-batches were averaged, without an error."""

    def program(rank):
        x, y = samples(n_samples)
        subject(tanh_net(), added, n_microbatches=2).step(x if rank == 0 else None, y if rank else None)

    found = errors(world, program)
    assert len(set(found)) == 1
    assert found[0].startswith("ValueError: Pipeline takes loss for a mean over samples, and for twice the samples it")


def only_of_two(out, targets):
    assert len(out) == 2
    return averaged(out, targets)


@pytest.mark.parametrize(
    ("loss", "keywords"),
    [
        (added, {"reduction": "sum"}),
        (added, {"reduction": "mean"}),
        (added, {"loss_weight": len}),
        (averaged, {}),
        (only_of_two, {}),
        (lambda out, targets: averaged(out, targets) + 1, {}),
        (lambda out, targets: 0 * added(out, targets), {}),
    ],
    ids=["sum", "meant", "weighted", "mean", "of two", "constant", "zero"],
)
def test_a_loss_that_says_what_it_does_or_is_a_mean_is_taken(subject, world, loss, keywords):
    found = errors(world, lambda rank: subject(tanh_net(), loss, n_microbatches=2, **keywords).step(*samples(4)))
    assert found == ["nothing"] * 2


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize("weight", [float("inf"), float("nan"), -1.0])
def test_a_weight_that_is_no_number_of_targets_is_refused_on_every_rank(subject, world, weight):
    def program(rank):
        weights = iter([3.0, weight])
        subject(tanh_net(), MSE, n_microbatches=2, loss_weight=lambda part: next(weights)).step(*samples(4))

    found = errors(world, program)
    assert (
        found
        == [
            f"ValueError: Pipeline got the weights [3.0, {weight}] from loss_weight; "
            "return how many targets count, a finite number that is not negative"
        ]
        * 2
    )
