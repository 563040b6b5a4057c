"""DataParallel computes the same as the plain module, for any module, batch and number of workers."""

from __future__ import annotations

import copy
import pickle
import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations

from pdlcheck.checks import check_replicated_module
from pdlcheck.checks.strategies import module_makers
from pdlcheck.primitives import ConvNet, LeNet
from pdlcheck.primitives.data_parallel.scatter import gather, scatter, split_sizes

CPU = torch.device("cpu")
verifies = pytest.mark.verifies("DataParallel")

few = settings(max_examples=10)
Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    scores: Tensor
    hidden: list[Tensor]
    scale: float = 2.0


@pytest.fixture
def wrap(subject):
    return lambda module, n: subject(module, workers=n)


def rows(*shape):
    return lambda n: (torch.randn(n, *shape),)


class Nested(nn.Module):
    """A module with every kind of container as input and output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, pair, extra, flag):
        left = self.layer(pair.left) * extra["scale"]
        right = self.layer(extra["deep"][0]).tanh()
        assert flag == "on"
        best = torch.max(left, dim=1)
        return OrderedDict(
            first=Pair(left, [right]), second=Output(left + right, [left, right]), flag=flag, best=best, none=None
        )


def nested_batch(n):
    return Pair(torch.randn(n, 2), None), {"scale": torch.tensor(1.5), "deep": (torch.randn(n, 2), 3)}, "on"


def nested_loss(output):
    return (output["first"].left.square() + output["second"].hidden[1]).mean() + output["best"].values.mean()


class Holding(nn.Module):
    """A module that refers to its parameters in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(2)])
        self.dict = nn.ParameterDict({"a": nn.Parameter(torch.randn(4)), "b": nn.Parameter(torch.randn(4))})
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight
        self.in_a_list = [self.one.weight]
        self.in_a_dict = {"layer": (self.other,)}
        self.method = self.twist
        self.bound = partial(self.shift, 1.0, by=self.dict["b"])
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.one.register_forward_hook(self.count)
        self.counts: dict[str, int] = {}

    def count(self, layer, args, output):
        assert layer is self.one
        self.counts["calls"] = self.counts.get("calls", 0) + 1
        return output * 2

    def twist(self, x):
        return x @ self.in_a_list[0].T

    def shift(self, factor, x, by):
        return x * factor + by

    def forward(self, x):
        assert self.one.weight is self.other.weight, "tied weights stay tied"
        assert self.one.weight is self.in_a_list[0]
        assert not self.frozen.requires_grad
        for parameter in self.list:
            x = x * parameter
        x = self.bound(self.method(x) + self.dict["a"] * self.frozen)
        return self.in_a_dict["layer"][0](torch.tanh(self.one(x)))


class Recurrent(nn.Module):
    def __init__(self, layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


class Stateful(nn.Module):
    """A module that takes and returns a hidden state; with ``turned`` the samples are its first dimension."""

    def __init__(self, layer, turned) -> None:
        super().__init__()
        self.layer, self.turned = layer, turned

    def turn(self, state):
        return tuple(part.transpose(0, 1).contiguous() for part in state) if self.turned else state

    def forward(self, x, state):
        out, state = self.layer(x, self.turn(state))
        return out, self.turn(state)


class Sometimes(nn.Module):
    """A module with a branch that only some samples use, and one that no sample uses."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x):
        y = self.always(x)
        mask = x[:, :1] > 0.5
        if mask.any():
            y = y + self.sometimes(x) * mask
        return y


@pytest.mark.if_subject_takes("workers")
@verifies
@few
@given(make=module_makers(), workers=st.integers(1, 5), sizes=st.lists(st.integers(0, 7), min_size=1, max_size=3))
def test_any_batch_on_any_number_of_workers_is_as_on_the_plain_module(subject, make, workers, sizes):
    def wrap(module, n):
        return subject(module, workers=n)

    make = replace(make, batch_norm=False)  # statistics of a piece differ from those of the batch
    check_replicated_module(wrap, make, rows(make.widths[0]), workers=[workers], sizes=[*sizes, 3])


@verifies
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: parametrizations.weight_norm(nn.Linear(4, 2)), (4,)),
        (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), (4,)),
        (lambda: parametrizations.spectral_norm(nn.Linear(4, 2)).eval(), (4,)),
        (lambda: Recurrent(nn.LSTM(4, 3, batch_first=True)), (2, 4)),
        (lambda: Recurrent(nn.GRU(4, 3, batch_first=True, bidirectional=True, num_layers=2)), (2, 4)),
        (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), (2, 4)),
        (lambda: nn.Conv2d(4, 2, 3, padding=1).to(memory_format=torch.channels_last), (4, 3, 3)),
        (Holding, (4,)),
        (Sometimes, (2,)),
    ],
    ids=["weight_norm", "orthogonal", "spectral_norm", "lstm", "gru", "transformer", "channels", "holding", "branch"],
)
def test_modules_that_refer_to_their_parameters_in_other_ways(wrap, make, shape):
    check_replicated_module(wrap, make, rows(*shape), workers=[3], sizes=[5, 2])


@verifies
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_the_older_weight_norm_that_sets_an_attribute_in_a_hook(wrap):
    check_replicated_module(wrap, lambda: nn.utils.weight_norm(nn.Linear(4, 2)), rows(4), workers=[2], sizes=[5])


@verifies
def test_nested_inputs_and_outputs_keep_their_types(wrap):
    check_replicated_module(wrap, Nested, nested_batch, loss=nested_loss, workers=[1, 3], sizes=[4, 2])


@pytest.mark.if_subject_takes("dim", "workers")
@verifies
@pytest.mark.parametrize("samples", [3, 4, 7])
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_hidden_state_has_its_samples_along_dim(subject, batch_first, samples):
    """The state is transposed if samples are the first dimension of the sequences; dimension 1 needs no change."""
    torch.manual_seed(0)
    plain = Stateful(nn.LSTM(3, 4, num_layers=2, batch_first=batch_first), turned=batch_first).double()
    replicated = subject(copy.deepcopy(plain), workers=2, dim=0 if batch_first else 1)
    shapes = [(samples, 5, 3), (samples, 2, 4)] if batch_first else [(5, samples, 3), (2, samples, 4)]
    x, *state = (torch.randn(shape, dtype=torch.float64) for shape in (*shapes, shapes[1]))
    expected, found = (module(x, tuple(state)) for module in (plain, replicated))
    for goal, value in zip((expected[0], *expected[1]), (found[0], *found[1]), strict=True):
        torch.testing.assert_close(value, goal)
    for out, (h, c) in (expected, found):
        (out.square().sum() + h.sum() + c.sum()).backward()
    for mine, goal in zip(replicated.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, goal.grad)


@pytest.mark.beyond_contract("error messages")
@verifies
def test_a_hidden_state_with_its_samples_elsewhere_is_refused(subject):
    """DataParallel of torch drops samples here."""
    layer = nn.LSTM(3, 4, batch_first=True)
    state = tuple(torch.zeros(1, 4, 4) for _ in range(2))
    with pytest.raises(ValueError, match=r"as many samples in every tensor along dim=0, got args\[0\] 4, .* 1;"):
        subject(layer, workers=2)(torch.zeros(4, 5, 3), state)


@pytest.mark.if_subject_takes("workers")
@verifies
def test_sparse_gradients(subject):
    table = nn.Embedding(10, 2, sparse=True)
    subject(table, workers=2)(torch.tensor([1, 2, 1, 4])).sum().backward()
    assert table.weight.grad.is_sparse
    assert table.weight.grad.to_dense().sum(1)[[1, 2, 4]].tolist() == [4, 2, 2]


@given(n=st.integers(0, 9) | st.integers(0, 200), workers=st.integers(1, 9))
def test_pieces_cover_the_batch_and_differ_by_one_sample(n, workers):
    sizes = split_sizes(n, workers)
    assert sum(sizes) == n
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == max(1, min(n, workers))


@given(n=st.integers(0, 9), workers=st.integers(1, 4), dim=st.integers(-2, 1))
def test_what_is_cut_is_put_together_again(n, workers, dim):
    x = torch.arange(n * 3).view(n, 3) if dim % 2 == 0 else torch.arange(n * 3).view(3, n)
    calls = scatter((x, {"k": [x + 1]}), {"flag": True}, [CPU] * workers, dim=dim)
    assert all(kwargs == {"flag": True} for _, kwargs in calls)
    together = gather([args for args, _ in calls], CPU, dim=dim)
    assert torch.equal(together[0], x)
    assert torch.equal(together[1]["k"][0], x + 1)


@pytest.mark.if_subject_takes("workers")
@verifies
def test_64_samples_on_4_workers_are_16_each_and_their_gradients_add_up(subject):
    """The gradient of the mean over all samples is the mean of the workers', as in "How parallel training works"."""
    seen = {}

    class Seeing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, x):
            seen[threading.current_thread().name] = len(x)
            return (x * self.weight).square().mean()  # the loss of a worker

    model = Seeing()
    x = torch.arange(64, dtype=torch.float64)
    losses = subject(model, workers=4)(x)
    losses.mean().backward()
    own = [2 * piece.square().mean() for piece in x.tensor_split(4)]
    assert list(seen.values()) == [16] * 4
    assert losses.shape == (4,)
    assert torch.isclose(model.weight.grad, sum(own) / 4)
    assert subject(model, workers=4)(x[:1]).shape == (1,), "the last batch of an epoch, as any other"
    assert subject(model, workers=1)(x).shape == ()


@pytest.mark.if_subject_takes("workers")
@verifies
def test_losses_of_uneven_pieces_are_weighted_with_their_sizes(subject):
    class Loss(nn.Linear):
        def forward(self, x):
            return super().forward(x).square().mean()

    model = Loss(2, 1).double()
    replicated, x = subject(model, workers=3), torch.randn(7, 2, dtype=torch.float64)
    sizes = torch.tensor(replicated.sizes(7))
    assert sizes.tolist() == [3, 2, 2]
    assert torch.isclose((replicated(x) * sizes).sum() / 7, model(x))


@pytest.mark.if_subject_takes("workers")
@verifies
def test_batch_norm_normalises_each_piece_and_keeps_the_statistics_of_the_first(subject):
    model, x = nn.BatchNorm1d(2).double(), torch.randn(8, 2, dtype=torch.float64)
    pieces = x.split(4)
    first, other = copy.deepcopy(model), copy.deepcopy(model)
    expected = torch.cat([first(pieces[0]), other(pieces[1])])
    assert torch.equal(subject(model, workers=2)(x), expected)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), first.buffers(), strict=True))


@verifies
@pytest.mark.parametrize("make", [LeNet, lambda: ConvNet().eval()], ids=["LeNet", "ConvNet"])
def test_a_convolutional_network_learns_as_without_workers(wrap, make):
    def loss(scores):
        return nn.functional.cross_entropy(scores, torch.arange(len(scores)) % 10)

    check_replicated_module(wrap, make, rows(1, 8, 8), loss=loss, workers=[2, 3, 4], sizes=[9, 4, 2])


@pytest.mark.if_subject_takes("workers")
@verifies
@pytest.mark.parametrize("workers", [2, 4])
def test_a_convnet_in_training_learns_from_pieces_that_are_normalised_each(subject, workers):
    """Output, gradients, statistics and weights of three steps equal those of the plain module, piece by piece."""
    plain = ConvNet().double()
    model = copy.deepcopy(plain)
    replicated = subject(model, workers=workers)
    ours, expected = (torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (model, plain))
    for samples in (12, 9, 8):
        images, labels = torch.randn(samples, 1, 8, 8, dtype=torch.float64), torch.arange(samples) % 10
        first, *others = images.split(replicated.sizes(samples))
        before = {name: buffer.clone() for name, buffer in plain.named_buffers()}
        pieces = [plain(first)]  # the first worker's statistics are kept
        for piece in others:
            pieces.append(functional_call(plain, {name: buffer.clone() for name, buffer in before.items()}, piece))
        for optimizer, scores in ((ours, replicated(images)), (expected, torch.cat(pieces))):
            optimizer.zero_grad()
            nn.functional.cross_entropy(scores, labels).backward()
            torch.testing.assert_close(scores, torch.cat(pieces), rtol=1e-9, atol=1e-12)
        gradients = ([parameter.grad for parameter in net.parameters()] for net in (model, plain))
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)
        assert all(parameter.grad.any() for parameter in model.parameters() if parameter.dim() > 1)
        ours.step()
        expected.step()
        torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-12)


@pytest.mark.if_subject_takes("workers")
@verifies
def test_what_forward_sets_stays_on_the_first_worker_only(subject):
    class Remembering(nn.Module):
        def forward(self, x):
            self.last = x
            self.register_buffer("mean", x.mean())
            return x

    model = Remembering()
    subject(model, workers=2)(torch.arange(4.0))
    assert model.last.tolist() == [0, 1]
    assert model.mean.item() == 0.5


@pytest.mark.if_subject_takes("workers")
@verifies
def test_train_and_eval_reach_the_copies(subject):
    replicated = subject(nn.Dropout(0.99), workers=3)
    x = torch.ones(30, 10)
    assert torch.equal(replicated.eval()(x), x)
    assert not torch.equal(replicated.train()(x), x)


@pytest.mark.if_subject_takes("workers")
@verifies
def test_a_forward_that_writes_into_its_input_does_not_write_into_the_caller_s(subject):
    class Writing(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    x = torch.ones(4, requires_grad=True) * 1
    assert subject(Writing(), workers=2)(x).tolist() == [2] * 4
    assert x.tolist() == [1] * 4


@pytest.mark.if_subject_takes("workers")
@verifies
def test_a_parameter_that_forward_clips_in_place(subject):
    class Clipping(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    model = Clipping(2, 1)
    subject(model, workers=2)(torch.ones(4, 2)).sum().backward()
    assert model.weight.abs().max() <= 0.1
    assert model.weight.grad.tolist() == [[4, 4]]


@pytest.mark.if_subject_takes("workers")
@verifies
def test_gradients_accumulate_and_can_be_differentiated_again(subject):
    model = nn.Linear(2, 1).double()
    replicated, x = subject(model, workers=3), torch.randn(5, 2, dtype=torch.float64)
    (grad,) = torch.autograd.grad(replicated(x).pow(3).sum(), model.weight, create_graph=True)
    (plain,) = torch.autograd.grad(model(x).pow(3).sum(), model.weight, create_graph=True)
    twice = [torch.autograd.grad(g.square().sum(), model.weight)[0] for g in (grad, plain)]
    assert torch.allclose(*twice, rtol=1e-12, atol=0)
    for _ in range(2):
        replicated(x).sum().backward()
    assert torch.allclose(model.weight.grad, 2 * x.sum(0), rtol=1e-12, atol=0)


@pytest.mark.if_subject_takes("workers")
@verifies
def test_the_keys_of_the_state_are_those_of_torchs(subject):
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    replicated, torchs = subject(net, workers=2), nn.DataParallel(copy.deepcopy(net))
    assert list(replicated.state_dict()) == list(torchs.state_dict())
    torchs.load_state_dict(replicated.state_dict())
    again = pickle.loads(pickle.dumps(copy.deepcopy(replicated)))
    assert again.sizes(3) == [2, 1]
