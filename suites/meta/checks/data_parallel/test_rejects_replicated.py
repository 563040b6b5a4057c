"""The check of replicated modules rejects wrong ones, names the cause, and accepts the correct twin."""

from __future__ import annotations

import collections
import copy
import dataclasses
import threading

import pytest
import torch
from torch import nn

from pdlcheck.checks import check_replicated_module
from pdlcheck.errors import Inconclusive


def net():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def batch(n):
    return (torch.randn(n, 2),)


def in_pieces(module, n):
    """Return the correct twin, which passes every piece through the module itself."""
    return lambda x: torch.cat([module(piece) for piece in x.tensor_split(n)])


def dropping_the_rest(module, n):
    return lambda x: torch.cat([module(x[i * (len(x) // n) :][: len(x) // n]) for i in range(n)])


def giving_everything_to_everyone(module, n):
    return lambda x: torch.cat([module(x) for _ in range(n)])


def joined_backwards(module, n):
    return lambda x: torch.cat([module(piece) for piece in reversed(x.tensor_split(n))])


def detached_copies(module, n):
    def forward(x):
        first, *others = x.tensor_split(n)
        return torch.cat([module(first), *(copy.deepcopy(module)(piece) for piece in others)])

    return forward


def forgetting_the_last(module, n):
    def forward(x):
        *pieces, last = x.tensor_split(n)
        return torch.cat([*map(module, pieces), copy.deepcopy(module)(last)])

    return forward


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def averaging(module, n):
    return lambda x: Scaled.apply(in_pieces(module, n)(x), 1 / n)


def summing(module, n):
    return lambda x: Scaled.apply(in_pieces(module, n)(x), n)


def in_another_thread(module, n):
    """Return a forward pass in another thread, which has a grad mode of its own."""

    def forward(x):
        outputs = []
        thread = threading.Thread(target=lambda: outputs.append(in_pieces(module, n)(x)))
        thread.start()
        thread.join()
        return outputs[0]

    return forward


def without_gradients(module, n):
    def forward(x):
        with torch.no_grad():
            return in_pieces(module, n)(x)

    return forward


def cutting_off_the_inputs(module, n):
    return lambda x: in_pieces(module, n)(x.detach())


def in_a_list(module, n):
    return lambda x: [in_pieces(module, n)(x)]


def on_a_copy(module, n):
    return in_pieces(copy.deepcopy(module), n)


def shrinking_weights(module, n):
    """Shrink the weights after the backward pass, so that only the next step is wrong."""

    def shrink(parameter):
        parameter.data.mul_(0.999)

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(shrink)
    return in_pieces(module, n)


def lower_precision(module, n):
    return lambda x: in_pieces(module.float(), n)(x.float()).double()


def test_check_replicated_module_accepts():
    check_replicated_module(in_pieces, net, batch)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (dropping_the_rest, "(?s)shape .*2 of 5 samples were dropped when the batch was cut"),
        (giving_everything_to_everyone, "(?s)shape .*12 samples too many: some went to several workers"),
        (joined_backwards, "(?s)output holds .*the samples are in another order"),
        (detached_copies, "(?s)gradient of .*samples of worker 0 give: the gradients of other workers were lost"),
        (forgetting_the_last, "(?s)gradient of .*what the samples of worker 2 give is missing"),
        (averaging, "(?s)gradient of .*it is 3 times too small: averaged over the workers"),
        (summing, "(?s)gradient of .*it is 3 times too large: summed where the loss is one mean"),
        (in_another_thread, r"(?s)requires a gradient under torch.no_grad\(\).*carry it into the workers"),
        (without_gradients, "(?s)does not lead back to the parameters.*workers run without gradients"),
        (cutting_off_the_inputs, r"(?s)gradient of input\[0\] is None, the plain module's is not None.*were detached"),
        (in_a_list, r"output is list of \(tensor\), the plain module's is tensor"),
        (on_a_copy, "gradient of '0.weight' is None, the plain module's is not None"),
        (shrinking_weights, "after the step '0.weight' holds"),
        (lower_precision, "output holds"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_check_replicated_module_rejects(broken, message):
    with pytest.raises(AssertionError, match=message) as caught:
        check_replicated_module(broken, net, batch, workers=[3], sizes=[6, 5, 4])
    assert f"{broken.__name__}: " in str(caught.value)
    assert "workers=3 samples=" in str(caught.value)


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x):
        return self.used(x)


def zeros_for_what_is_unused(module, n):
    return lambda x: in_pieces(module, n)(x) + 0 * sum(p.sum() for p in module.parameters())


def test_check_replicated_module_rejects_zeros_for_none():
    check_replicated_module(in_pieces, Branch, batch)
    with pytest.raises(AssertionError, match=r"(?s)'unused.weight' is not None, the plain module's is None.*momentum"):
        check_replicated_module(zeros_for_what_is_unused, Branch, batch)


def test_check_replicated_module_is_inconclusive_where_it_sees_nothing():
    with pytest.raises(Inconclusive, match="the plain module gives two outputs for one batch"):
        check_replicated_module(in_pieces, lambda: nn.Sequential(nn.Linear(2, 8), nn.Dropout()), batch)
    with pytest.raises(Inconclusive, match="the gradient of the plain module is zero"):
        check_replicated_module(in_pieces, net, batch, loss=lambda y: y.sum() * 0)


def test_check_replicated_module_says_what_a_batch_is():
    with pytest.raises(TypeError, match="batch must return a tuple of the arguments of one call, got Tensor"):
        check_replicated_module(in_pieces, net, lambda n: torch.randn(n, 2))


class Masked(nn.Module):
    """A model with a logit that is -inf, and one that is NaN."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(2, 3)

    def forward(self, x):
        beside = torch.tensor([[-torch.inf, torch.nan]], dtype=x.dtype).expand(len(x), 2)
        return torch.cat([self.scores(x), beside], 1)


def off_by_a_thousandth(module, n):
    return lambda x: in_pieces(module, n)(x) * 1.001


def never_infinite(module, n):
    return lambda x: in_pieces(module, n)(x).nan_to_num(torch.nan, neginf=-1e300)


def test_what_is_infinite_or_no_number_is_so_in_both():
    def loss(y):
        return y[:, :3].square().mean()

    check_replicated_module(in_pieces, Masked, batch, loss=loss)
    with pytest.raises(AssertionError, match=r"wrong elements +18 of 30"):
        check_replicated_module(off_by_a_thousandth, Masked, batch, loss=loss)
    with pytest.raises(AssertionError, match=r"holds -1e\+300 at \(0, 3\), the plain module's holds -inf"):
        check_replicated_module(never_infinite, Masked, batch, loss=loss)


class Wave(nn.Module):
    """A model whose weights stay complex64 when other models become float64."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, dtype=torch.complex64))

    def forward(self, x):
        return (x * self.weight).abs()


def test_what_is_not_in_float64_may_be_off_by_its_own_roundings():
    def waves(n):
        return (torch.randn(n, 2, dtype=torch.complex64),)

    check_replicated_module(in_pieces, Wave, waves)
    with pytest.raises(AssertionError, match="output holds"):
        check_replicated_module(off_by_a_thousandth, Wave, waves)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    size: int = dataclasses.field(init=False)

    def __post_init__(self):
        self.size = len(self.x)


class Structured(nn.Linear):
    def forward(self, given):
        return collections.defaultdict(list, {"y": super().forward(given["batch"].x)})


def test_dataclasses_with_fields_of_their_own_and_dicts_with_a_default():
    def wrap(module, n):
        def forward(given):
            pieces = [module({"batch": Batch(x)})["y"] for x in given["batch"].x.tensor_split(n)]
            return collections.defaultdict(list, {"y": torch.cat(pieces)})

        return forward

    def structured(n):
        return (collections.defaultdict(int, {"batch": Batch(torch.randn(n, 2))}),)

    check_replicated_module(wrap, lambda: Structured(2, 1), structured)
