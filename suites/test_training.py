"""Training on replicas takes the steps of one process; so does local SGD where it must."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pdlcheck.checks import check_replicas_in_sync, check_same_trajectory, check_world_size_does_not_matter
from pdlcheck.primitives import function_samples, train_local_sgd, train_synchronous

MSE = nn.MSELoss()
INPUTS = torch.linspace(-1, 1, 24, dtype=torch.float64).view(12, 2)
DATA = INPUTS, INPUTS.sum(1, keepdim=True).sin()
SGD = partial(torch.optim.SGD, lr=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
NESTEROV = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
ADAM = partial(torch.optim.Adam, lr=0.1)
few = settings(max_examples=8)
OPTIMIZERS = pytest.mark.parametrize(
    "optimizer", [SGD, MOMENTUM, NESTEROV], ids=["plain", "momentum", "nesterov-decay"]
)
BOTH = [
    pytest.param(name, marks=pytest.mark.verifies(name), id=name) for name in ("train_local_sgd", "train_synchronous")
]


def tanh_net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


@pytest.mark.verifies("train_synchronous")
@few
@given(
    optimizer=st.sampled_from([MOMENTUM, ADAM]),
    global_batch=st.integers(1, 13),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
)
def test_synchronous_sgd_on_any_number_of_replicas_is_that_of_one_process(
    subject, world, optimizer, global_batch, shuffle, seed
):
    def synchronous(model, steps):
        subject(
            model,
            MSE,
            DATA,
            optimizer=optimizer,
            epochs=steps,
            global_batch=global_batch,
            shuffle=shuffle,
            seed=seed,
        )

    check_world_size_does_not_matter(synchronous, tanh_net, world, world_sizes=(1, 2, 3), steps=2)


@pytest.mark.verifies("train_synchronous")
def test_synchronous_sgd_takes_the_steps_of_a_plain_loop(subject, world):
    def plain(model, steps):
        optimizer = MOMENTUM(model.parameters())
        for _ in range(steps):
            for x, y in zip(DATA[0].split(5), DATA[1].split(5), strict=True):
                optimizer.zero_grad()
                MSE(model(x), y).backward()
                optimizer.step()

    def synchronous(model, steps):
        subject(model, MSE, DATA, optimizer=MOMENTUM, epochs=steps, global_batch=5, shuffle=False)

    check_same_trajectory(synchronous, plain, tanh_net, world, world_size=3, steps=3)


@OPTIMIZERS
@pytest.mark.verifies("train_local_sgd")
def test_local_sgd_with_sync_every_1_is_synchronous_sgd(subject, world, optimizer):
    def local(model, steps):
        subject(model, MSE, DATA, optimizer=optimizer, epochs=steps, global_batch=6, sync_every=1)

    def synchronous(model, steps):
        train_synchronous(model, MSE, DATA, optimizer=optimizer, epochs=steps, global_batch=6)

    check_same_trajectory(local, synchronous, tanh_net, world, world_size=3, steps=3)


@pytest.mark.verifies("train_local_sgd")
def test_local_sgd_with_sync_every_1_is_not_synchronous_for_adam(subject, world):
    def local(model, steps):
        subject(model, MSE, DATA, optimizer=ADAM, epochs=steps, global_batch=6, sync_every=1)

    def synchronous(model, steps):
        train_synchronous(model, MSE, DATA, optimizer=ADAM, epochs=steps, global_batch=6)

    with pytest.raises(AssertionError, match="of parameter"):
        check_same_trajectory(local, synchronous, tanh_net, world, world_size=3, steps=3)


@pytest.mark.verifies("train_local_sgd")
@few
@given(sync_every=st.integers(1, 5), world_size=st.integers(2, 4), global_batch=st.integers(1, 9))
def test_local_sgd_leaves_equal_replicas_whatever_k_is(subject, world, sync_every, world_size, global_batch):
    def start():
        model = tanh_net().double()

        def step(i):
            subject(model, MSE, DATA, optimizer=SGD, epochs=1, global_batch=global_batch, sync_every=sync_every)

        subject(model, MSE, DATA, optimizer=SGD, epochs=0, global_batch=1, sync_every=1)
        return model, step

    check_replicas_in_sync(start, world, world_size=world_size, steps=2, gradients=False)


@pytest.mark.verifies("train_local_sgd")
def test_replicas_of_local_sgd_step_alone_between_averages(subject, world):
    """One average at the end equals the mean of the weights that the ranks reach alone."""
    steps = 3

    def end():
        torch.manual_seed(0)
        model = tanh_net().double()
        subject(model, MSE, DATA, optimizer=SGD, epochs=steps, global_batch=12, sync_every=10, shuffle=False)
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    def alone(half):
        torch.manual_seed(0)
        model = tanh_net().double()
        optimizer = SGD(model.parameters())
        for _ in range(steps):
            optimizer.zero_grad()
            MSE(model(DATA[0][half]), DATA[1][half]).backward()
            optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    expected = (alone(slice(0, 6)) + alone(slice(6, 12))) / 2
    for found in world.run(end, world_size=2):
        assert (found - expected).abs().max() <= 1e-14  # a few round-off errors of numbers below 1


@pytest.mark.parametrize("name", BOTH)
def test_the_loss_is_the_mean_over_all_samples_and_falls(name, subject, world):
    keywords = {"sync_every": 2} if name == "train_local_sgd" else {}

    def train():
        torch.manual_seed(0)
        model = tanh_net().double()
        with torch.no_grad():
            before = MSE(model(DATA[0]), DATA[1]).item()
        return before, subject(model, MSE, DATA, optimizer=SGD, epochs=20, global_batch=12, **keywords)

    everyone = world.run(train, world_size=5)  # 5 does not divide the 12 samples
    for before, losses in everyone:
        assert losses == everyone[0][1]
        assert losses[0] == pytest.approx(before, rel=1e-12)
        assert losses[-1] < 0.5 * losses[0]


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.world_size(2)
def test_training_refuses(name, subject):
    train = partial(subject, tanh_net(), MSE, DATA, optimizer=SGD, epochs=1, global_batch=4)
    if name == "train_local_sgd":
        train = partial(train, sync_every=1)
        with pytest.raises(ValueError, match="train_local_sgd needs sync_every of at least 1, got sync_every=0"):
            train(sync_every=0)
    with pytest.raises(ValueError, match=f"{name} needs global_batch of at least 1, got global_batch=0"):
        train(global_batch=0)
    with pytest.raises(ValueError, match=f"{name} needs epochs of at least 0, got epochs=-1"):
        train(epochs=-1)
    with pytest.raises(TypeError, match=f"{name} takes seed as an int, got float"):
        train(seed=1.5)
    keywords = {**train.keywords}
    with pytest.raises(ValueError, match=f"{name} needs a target for every input, got 12 inputs and 3 targets"):
        subject(tanh_net(), MSE, (DATA[0], DATA[1][:3]), **keywords)
    with pytest.raises(TypeError, match=f"{name} takes data as two tensors, .* got Tensor, ndarray; torch.as_tensor"):
        subject(tanh_net(), MSE, (DATA[0], DATA[1].numpy()), **keywords)
    with pytest.raises(TypeError, match=f"{name} takes data as two tensors, .* got Tensor, Tensor, Tensor"):
        subject(tanh_net(), MSE, (*DATA, DATA[1]), **keywords)
    with pytest.raises(TypeError, match=f"{name} takes data as two tensors, .* got NoneType"):
        subject(tanh_net(), MSE, None, **keywords)
    with pytest.raises(ValueError, match=f"{name} needs a sample in each row .* without dimensions"):
        subject(tanh_net(), MSE, (DATA[0], torch.tensor(1.0)), **keywords)
    with pytest.raises(ValueError, match="got an empty model"):
        subject(nn.ReLU(), MSE, DATA, **keywords)


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("argument", "values"), [("seed", (0, 1)), ("epochs", (1, 2)), ("global_batch", (4, 6)), ("shuffle", (True, False))]
)
def test_ranks_with_other_arguments_are_refused_on_all(name, subject, rank, argument, values):
    keywords = {"sync_every": 1} if name == "train_local_sgd" else {}
    keywords = {"optimizer": SGD, "epochs": 1, "global_batch": 4, **keywords, argument: values[rank]}
    found = f"needs the same {argument} on every rank, got {values[0]} on rank 0 and {values[1]} on rank 1"
    with pytest.raises(ValueError, match=f"{name} {found}"):
        subject(tanh_net().double(), MSE, DATA, **keywords)


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.world_size(2)
def test_what_is_wrong_with_the_training_of_one_rank_is_refused_on_all(name, subject, rank):
    keywords = {"sync_every": 1} if name == "train_local_sgd" else {}
    keywords = {"optimizer": SGD, "epochs": 1, "global_batch": 4, **keywords}
    with pytest.raises(ValueError, match=rf"{name} needs epochs of at least 0, got epochs=-1 \(on rank 1\)"):
        subject(tanh_net().double(), MSE, DATA, **{**keywords, "epochs": -rank})
    with pytest.raises(ValueError, match=f"{name} needs the same number of samples on every rank, got 12 .* and 11 on"):
        subject(tanh_net().double(), MSE, (DATA[0][rank:], DATA[1][rank:]), **keywords)
    with pytest.raises(TypeError, match=rf"{name} takes data as two tensors, .* got list, list; .* \(on rank 1\)"):
        subject(tanh_net().double(), MSE, tuple(part.tolist() for part in DATA) if rank else DATA, **keywords)
    with pytest.raises(ValueError, match=rf"{name} got an empty model: ReLU .*\(on rank 1\)"):
        subject(nn.ReLU() if rank else tanh_net().double(), MSE, DATA, **keywords)
    own = {"optimizer": partial(torch.optim.SGD, lr=0.5 - rank / 4)}
    with pytest.raises(ValueError, match=r"needs the same lr of the optimizer's group 0 on every rank, got 0.5"):
        subject(tanh_net().double(), MSE, DATA, **{**keywords, **own})
    if name == "train_local_sgd":
        with pytest.raises(ValueError, match=rf"{name} needs sync_every of at least 1, got sync_every=0 \(on rank 0\)"):
            subject(tanh_net().double(), MSE, DATA, **{**keywords, "sync_every": rank})


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("train_synchronous")
@pytest.mark.world_size(2)
def test_a_sparse_gradient_of_one_rank_is_refused_on_all(subject):
    model = nn.Embedding(3, 1, sparse=True)
    data = torch.tensor([0, 1, 2]), torch.zeros(3, 1)
    with pytest.raises(ValueError, match=r"needs dense gradients, parameter '0' has layout .* \(on rank 0\)"):
        subject(model, MSE, data, optimizer=SGD, epochs=1, global_batch=1)  # rank 1 has no samples


@pytest.mark.verifies("FunctionNet")
def test_the_function_network_has_the_documented_layers(subject):
    shapes = [tuple(p.shape) for p in subject().parameters() if p.dim() == 2]
    assert shapes == [(80, 1), (80, 80), (40, 80), (1, 40)]


@pytest.mark.verifies("function_samples")
def test_samples_lie_on_the_documented_function(subject):
    x, y = subject(81, dtype=torch.float64)
    assert x.shape == y.shape == (81, 1)
    assert (x[0], x[-1]) == (0, 20)
    assert y[40] == pytest.approx(10**0.5 * torch.sin(torch.tensor(3.14 * 2, dtype=torch.float64)).item())


@pytest.mark.verifies("FunctionNet")
@pytest.mark.parametrize(
    "train", [train_synchronous, partial(train_local_sgd, sync_every=4)], ids=["synchronous", "local"]
)
def test_replicas_learn_the_function(subject, world, train):
    data = function_samples(600)

    def learn():
        torch.manual_seed(0)
        adam = partial(torch.optim.Adam, lr=0.01)
        return train(subject(), MSE, data, optimizer=adam, epochs=40, global_batch=60)

    first, second = world.run(learn, world_size=2)
    assert first == second
    assert first[-1] < 0.4 * first[0]


@pytest.mark.verifies("LeNet")
def test_replicas_of_lenet_read_the_digits_by_local_sgd(subject, world):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install 'pdlcheck[data]'")
    from pdlcheck.primitives.digits import digits

    train_data, (images, labels) = digits(), digits(train=False)

    def train():
        torch.manual_seed(0)
        model = subject()
        optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        train_local_sgd(
            model, nn.CrossEntropyLoss(), train_data, optimizer=optimizer, epochs=6, global_batch=50, sync_every=4
        )
        return model.state_dict()

    first, second = world.run(train, world_size=2)
    assert all(torch.equal(first[name], second[name]) for name in first)
    model = subject()
    model.load_state_dict(first)
    assert (model(images).argmax(1) == labels).double().mean() > 0.9


@pytest.mark.verifies("LeNet")
def test_lenet_on_1_2_and_4_replicas_reads_the_digits_and_ends_with_the_same_weights(subject, world):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install 'pdlcheck[data]'")
    from pdlcheck.primitives.digits import digits

    train_data = digits(dtype=torch.float64)
    images, labels = digits(train=False, dtype=torch.float64)

    def synchronous(model, steps):
        optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        train_synchronous(model, nn.CrossEntropyLoss(), train_data, optimizer=optimizer, epochs=steps, global_batch=50)

    models = check_world_size_does_not_matter(synchronous, subject, world, world_sizes=(1, 2, 4), steps=6)
    for model in models:
        accuracy = (model(images).argmax(1) == labels).double().mean()
        assert accuracy > 0.9
