"""A module on several workers of one process: outputs, gradients and steps are those of the plain module."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations, rnn

from pdlcheck.checks import check_replicated_module
from pdlcheck.checks.strategies import module_makers
from pdlcheck.primitives.data_parallel.nested import map_nested
from pdlcheck.primitives.data_parallel.replicate import replicate
from pdlcheck.primitives.data_parallel.scatter import gather, scatter, split_sizes

CPU = torch.device("cpu")
few = settings(max_examples=10)
verifies = pytest.mark.verifies("DataParallel")
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
    """Every kind of container in and out."""

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
    """Refers to its parameters in every way."""

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


class Sometimes(nn.Module):
    """A branch that only some samples use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x):
        y = self.always(x)
        mask = x[:, :1] > 0.5
        if mask.any():
            y = y + self.sometimes(x) * mask
        return y


@verifies
@few
@given(make=module_makers(), workers=st.integers(1, 5), sizes=st.lists(st.integers(0, 7), min_size=1, max_size=3))
def test_any_batch_on_any_number_of_workers_is_as_on_the_plain_module(subject, make, workers, sizes):
    def wrap(module, n):
        return subject(module, workers=n)

    make = replace(make, batch_norm=False)  # statistics of a piece are not those of the batch
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


@verifies
def test_sparse_gradients(subject):
    table = nn.Embedding(10, 2, sparse=True)
    subject(table, workers=2)(torch.tensor([1, 2, 1, 4])).sum().backward()
    assert table.weight.grad.is_sparse
    assert table.weight.grad.to_dense().sum(1)[[1, 2, 4]].tolist() == [4, 2, 2]


@given(n=st.integers(0, 200), workers=st.integers(1, 9))
def test_pieces_cover_the_batch_and_differ_by_one_sample(n, workers):
    sizes = split_sizes(n, workers)
    assert sum(sizes) == n and max(sizes) - min(sizes) <= 1 and len(sizes) == max(1, min(n, workers))


@given(n=st.integers(0, 9), workers=st.integers(1, 4), dim=st.integers(-2, 1))
def test_what_is_cut_is_put_together_again(n, workers, dim):
    x = torch.arange(n * 3).view(n, 3) if dim % 2 == 0 else torch.arange(n * 3).view(3, n)
    calls = scatter((x, {"k": [x + 1]}), {"flag": True}, [CPU] * workers, dim=dim)
    assert all(kwargs == {"flag": True} for _, kwargs in calls)
    together = gather([args for args, _ in calls], CPU, dim=dim)
    assert torch.equal(together[0], x) and torch.equal(together[1]["k"][0], x + 1)


@verifies
def test_64_samples_on_4_workers_are_16_each_and_their_gradients_add_up(subject):
    """dl/dw of the mean over all samples is the mean of the workers' own, as "How parallel training works" has it."""
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
    assert list(seen.values()) == [16] * 4 and losses.shape == (4,)
    assert torch.isclose(model.weight.grad, sum(own) / 4)


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


@verifies
def test_batch_norm_normalises_each_piece_and_keeps_the_statistics_of_the_first(subject):
    model, x = nn.BatchNorm1d(2).double(), torch.randn(8, 2, dtype=torch.float64)
    pieces = x.split(4)
    first, other = copy.deepcopy(model), copy.deepcopy(model)
    expected = torch.cat([first(pieces[0]), other(pieces[1])])
    assert torch.equal(subject(model, workers=2)(x), expected)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), first.buffers(), strict=True))


@verifies
def test_what_forward_sets_stays_on_the_first_worker_only(subject):
    class Remembering(nn.Module):
        def forward(self, x):
            self.last = x
            self.register_buffer("mean", x.mean())
            return x

    model = Remembering()
    subject(model, workers=2)(torch.arange(4.0))
    assert model.last.tolist() == [0, 1] and model.mean.item() == 0.5


@verifies
def test_train_and_eval_reach_the_copies(subject):
    replicated = subject(nn.Dropout(0.99), workers=3)
    x = torch.ones(30, 10)
    assert torch.equal(replicated.eval()(x), x)
    assert not torch.equal(replicated.train()(x), x)


@verifies
def test_a_forward_that_writes_into_its_input_does_not_write_into_the_caller_s(subject):
    class Writing(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    x = torch.ones(4, requires_grad=True) * 1
    assert subject(Writing(), workers=2)(x).tolist() == [2] * 4
    assert x.tolist() == [1] * 4


@verifies
def test_a_parameter_that_forward_clips_in_place(subject):
    class Clipping(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    model = Clipping(2, 1)
    subject(model, workers=2)(torch.ones(4, 2)).sum().backward()
    assert model.weight.abs().max() <= 0.1 and model.weight.grad.tolist() == [[4, 4]]


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


@verifies
def test_the_keys_of_the_state_are_those_of_torchs(subject):
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    replicated, torchs = subject(net, workers=2), nn.DataParallel(copy.deepcopy(net))
    assert list(replicated.state_dict()) == list(torchs.state_dict())
    torchs.load_state_dict(replicated.state_dict())
    again = pickle.loads(pickle.dumps(copy.deepcopy(replicated)))
    assert again.sizes(3) == [2, 1]


# threads


class Context(nn.Module):
    """Tells what a worker's thread has set."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.seen: list[tuple[object, ...]] = []

    def forward(self, x):
        made = torch.ones(1)
        self.seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), made.dtype, made.device.type))
        return x @ self.weight


@verifies
def test_every_worker_has_the_settings_of_the_caller(subject):
    model = Context()
    replicated, x = subject(model, workers=3), torch.ones(3, 2)
    with torch.no_grad():
        assert not replicated(x).requires_grad
    with torch.inference_mode():
        assert replicated(x).is_inference()
    with torch.device("meta"):
        replicated(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert replicated(x).dtype == torch.bfloat16
    assert replicated(x).dtype == torch.float32
    expected = [(False, False, "cpu"), (False, True, "cpu"), (True, False, "meta"), (True, False, "cpu")]
    assert [(grad, inf, kind) for grad, inf, _, kind in model.seen[:12:3]] == expected
    assert all(model.seen[i] == model.seen[3 * (i // 3)] for i in range(15))


@verifies
def test_the_default_dtype_reaches_the_workers(subject):
    class Making(nn.Module):
        def forward(self, x):
            return x + torch.zeros(1)

    torch.set_default_dtype(torch.float64)
    try:
        assert subject(Making(), workers=2)(torch.ones(2, dtype=torch.int64)).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


class Failing(nn.Module):
    def __init__(self, *bad) -> None:
        super().__init__()
        self.bad, self.ended = bad, []

    def forward(self, x):
        if int(x[0]) in self.bad:
            raise KeyError(f"sample {int(x[0])}")
        time.sleep(0.05)  # longer than it takes to fail
        self.ended.append(int(x[0]))
        return x


@verifies
@pytest.mark.parametrize("bad", [(0,), (1,), (2, 1), (0, 2)])
def test_one_error_is_raised_after_all_workers_have_ended_and_names_them(subject, bad):
    model = Failing(*bad)
    before = threading.active_count()
    with pytest.raises(KeyError, match=f"sample {min(bad)}") as caught:
        subject(model, workers=3)(torch.arange(3))
    assert caught.value.__notes__[0] == f"in worker {min(bad)} of 3 (cpu)"
    others = [f"worker {max(bad)} of 3 (cpu) failed too: KeyError: 'sample {max(bad)}'"] if len(bad) > 1 else []
    assert caught.value.__notes__[1:] == others
    assert sorted(model.ended) == sorted({0, 1, 2} - set(bad))
    assert threading.active_count() == before


@verifies
@pytest.mark.parametrize("rng", ["same", "distinct"])
def test_random_numbers_repeat_and_are_equal_on_all_workers_or_on_none(subject, rng):
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        replicated = subject(nn.Dropout(0.5), workers=3, rng=rng)
        drawn.append(torch.cat([replicated(torch.ones(3, 64)) for _ in range(2)]))
    assert torch.equal(*drawn)
    masks = [row.tolist() for row in drawn[0]]
    assert len({tuple(mask) for mask in masks}) == (2 if rng == "same" else 6)
    assert (masks[0] == masks[1] == masks[2]) == (rng == "same")


@verifies
def test_with_the_same_numbers_the_first_worker_draws_what_the_plain_module_draws(subject):
    torch.manual_seed(3)
    plain = nn.Dropout(0.5)(torch.ones(2, 8)), torch.rand(1)
    torch.manual_seed(3)
    found = subject(nn.Dropout(0.5), workers=2, rng="same")(torch.ones(4, 8)), torch.rand(1)
    assert torch.equal(found[0][:2], plain[0]) and torch.equal(found[1], plain[1])


@verifies
@pytest.mark.world_size(2)
def test_a_rank_may_have_workers(subject, rank):
    model = nn.Linear(2, 1, bias=False)
    subject(model, workers=2)(torch.full((3, 2), rank + 1.0)).sum().backward()
    assert model.weight.grad.tolist() == [[3 * (rank + 1.0)] * 2]


# memory


@pytest.mark.verifies("memory_by_worker")
def test_memory_counts_what_each_worker_holds(subject):
    from pdlcheck.primitives import DataParallel

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            return self.last(torch.tanh(self.first(x)))

    replicated = DataParallel(Net(), workers=4)
    found = subject(replicated, lambda y: y.square().mean(), torch.ones(12, 8))
    parameters = 4 * (8 * 16 + 16 + 16 * 8 + 8)
    # a worker keeps its 3 samples, 8 numbers each, and their 16 tanh; the first keeps the output of all 12 for square
    assert [m.activations for m in found] == [4 * 3 * 24 + 4 * 12 * 8, *[4 * 3 * 24] * 3]
    assert {m.parameters for m in found} == {m.gradients for m in found} == {parameters}
    assert [m.total for m in found] == [m.parameters + m.gradients + m.activations for m in found]
    assert all(p.grad is None for p in replicated.parameters())
    assert len(subject(replicated, lambda y: y.sum(), torch.ones(2, 8))) == 2


@pytest.mark.verifies("memory_by_worker")
def test_memory_is_of_data_parallel_only(subject):
    with pytest.raises(TypeError, match="memory_by_worker takes a DataParallel of pdlcheck, got Linear"):
        subject(nn.Linear(1, 1), torch.sum, torch.ones(1, 1))


# bad input


@verifies
@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "message"),
    [
        ((len,), {}, TypeError, "takes a torch.nn.Module, got builtin_function_or_method"),
        ((nn.LazyLinear(1),), {}, ValueError, "'weight', which has no shape yet; run one forward pass first"),
        ((nn.Linear(1, 1), []), {}, ValueError, "needs a worker, got devices="),
        ((nn.Linear(1, 1), "cpu"), {}, TypeError, r"devices as a list, got 'cpu'; pass \['cpu'\]"),
        ((nn.Linear(1, 1), ["cpu", "meta"]), {}, ValueError, "workers on cpu and cuda, got device meta"),
        ((nn.Linear(1, 1), ["cuda:99"]), {}, ValueError, r"device cuda:99, this process sees \d+ CUDA"),
        ((nn.Linear(1, 1), ["cpu"]), {"workers": 2}, ValueError, "devices or workers, got devices="),
        ((nn.Linear(1, 1),), {"workers": 0}, ValueError, "needs workers of at least 1, got workers=0"),
        ((nn.Linear(1, 1),), {"workers": True}, TypeError, "takes workers as an int, got bool"),
        ((nn.Linear(1, 1),), {"rng": "seeded"}, ValueError, "knows rng 'device', 'distinct', 'same', got 'seeded'"),
        ((nn.Linear(1, 1),), {"shared": "mask"}, TypeError, "shared as a list of names, got the string 'mask'"),
        ((nn.Linear(1, 1, device="meta"), ["cpu"]), {}, ValueError, r"'weight' is on meta; call module.to\('cpu'\)"),
        ((nn.Sequential(nn.DataParallel(nn.ReLU())),), {}, TypeError, "DataParallel '0', which makes replicas itself"),
    ],
    ids=lambda value: None,
)
def test_a_wrong_argument_is_refused(subject, arguments, keywords, error, message):
    with pytest.raises(error, match=message):
        subject(*arguments, **keywords)


@verifies
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_module_is_refused(subject):
    with pytest.raises(TypeError, match="a RecursiveScriptModule: it is compiled; wrap the module that it was made of"):
        subject(torch.jit.script(nn.Linear(1, 1)))
    with pytest.raises(TypeError, match=r"OptimizedModule: it is compiled; wrap the module before torch\.compile"):
        subject(torch.compile(nn.Linear(1, 1)))


@verifies
@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ((torch.ones(3, 1), torch.ones(1, 1)), ValueError, r"as many samples .* got args\[0\] 3, args\[1\] 1; name"),
        (({"a": [torch.ones(2)]}, torch.ones(4)), ValueError, r"args\[0\]\['a'\]\[0\] 2, args\[1\] 4"),
        ((rnn.pack_sequence([torch.ones(2)]),), TypeError, r"args\[0\] is a PackedSequence, .* inside forward"),
    ],
    ids=["sizes", "nested", "packed"],
)
def test_a_batch_that_cannot_be_cut_is_refused(subject, inputs, error, message):
    with pytest.raises(error, match=message):
        subject(nn.Identity(), workers=2)(*inputs)


@verifies
def test_a_dimension_that_a_tensor_does_not_have(subject):
    with pytest.raises(ValueError, match=r"cuts along dim=1, args\[0\] has shape \(3,\)"):
        subject(nn.Identity(), workers=2, dim=1)(torch.ones(3))


@verifies
def test_shared_arguments_go_to_every_worker_whole(subject):
    class Masked(nn.Module):
        def forward(self, x, *, mask):
            assert mask.shape == (1, 3)
            return x * mask

    assert subject(Masked(), workers=2, shared=["mask"])(torch.ones(4, 3), mask=torch.ones(1, 3)).shape == (4, 3)


class Returning(nn.Module):
    def __init__(self, value) -> None:
        super().__init__()
        self.value = value

    def forward(self, x):
        return self.value(int(x[0]), x)


@verifies
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (lambda w, x: torch.ones(1, w + 1), ValueError, r"output along dim=0: it has shape \(1, 1\) on worker 0"),
        (lambda w, x: {"n": w}, TypeError, r"output\['n'\] together: 0 on worker 0, 1 on worker 1; return tensors"),
        (lambda w, x: [x] * (w + 1), ValueError, "output has 1 on worker 0, 2 on worker 1 entries"),
        (lambda w, x: (x, [x])[w], TypeError, "output together: Tensor on worker 0, list on worker 1"),
        (lambda w, x: ([x], x)[w], TypeError, "output is list on worker 0, Tensor on worker 1"),
        (lambda w, x: {w: x}, ValueError, "output has keys .* on worker 0"),
        (lambda w, x: object(), TypeError, "output together: object on worker 0, object on worker 1"),
    ],
    ids=["shapes", "numbers", "lengths", "tensor-and-list", "list-and-tensor", "keys", "objects"],
)
def test_outputs_that_do_not_fit_together_are_refused(subject, value, error, message):
    with pytest.raises(error, match=message):
        subject(Returning(value), workers=2)(torch.arange(2))


@verifies
def test_equal_values_that_are_no_tensors_are_passed_on(subject):
    both = subject(Returning(lambda w, x: {"text": "a", "n": 3, "none": None, "x": x}), workers=2)(torch.arange(2))
    assert both == {"text": "a", "n": 3, "none": None, "x": both["x"]}


@verifies
def test_a_module_that_was_moved_away_is_refused(subject):
    replicated = subject(nn.Linear(1, 1), workers=2)
    replicated.module.to("meta")
    with pytest.raises(ValueError, match="'weight' is on meta"):
        replicated(torch.ones(2, 1))


def test_mappings_keep_their_kind():
    found = map_nested(lambda v, path: sum(v), [defaultdict(list, a=1), defaultdict(list, a=2)], "x")
    assert type(found) is defaultdict and found["a"] == 3 and found["b"] == []


def test_copies_hold_the_structure_of_a_long_list_of_modules():
    layers = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(1100)])
    one, other = replicate(layers, [CPU, CPU])
    assert one is layers
    assert not any(a is b for a, b in zip(one.modules(), other.modules(), strict=True))
    assert not any(a is b for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.gpu
@verifies
def test_two_workers_on_one_gpu(subject):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double().cuda()
    twin, x = copy.deepcopy(model), torch.randn(5, 4, dtype=torch.float64)
    replicated = subject(model, ["cuda:0", "cuda:0"])
    found, expected = replicated(x), twin(x.cuda())
    assert torch.allclose(found, expected, rtol=1e-12)
    found.square().mean().backward(), expected.square().mean().backward()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.allclose(a.grad, b.grad, rtol=1e-10) for a, b in pairs)
