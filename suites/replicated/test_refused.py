"""DataParallel refuses inputs, outputs and modules that it cannot split, gather or copy, and names them."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

from pdlcheck.primitives.data_parallel.nested import map_nested
from pdlcheck.primitives.data_parallel.replicate import replicate

CPU = torch.device("cpu")
verifies = pytest.mark.verifies("DataParallel")


@pytest.mark.beyond_contract("error messages")
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


@pytest.mark.beyond_contract("error messages")
@verifies
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # warnings of torch.jit
def test_a_compiled_module_is_refused(subject):
    with pytest.raises(TypeError, match="a RecursiveScriptModule: it is compiled; wrap the module that it was made of"):
        subject(torch.jit.script(nn.Linear(1, 1)))
    with pytest.raises(TypeError, match=r"OptimizedModule: it is compiled; wrap the module before torch\.compile"):
        subject(torch.compile(nn.Linear(1, 1)))


@pytest.mark.beyond_contract("error messages")
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


@pytest.mark.beyond_contract("error messages")
@verifies
def test_a_dimension_that_a_tensor_does_not_have(subject):
    with pytest.raises(ValueError, match=r"cuts along dim=1, args\[0\] has shape \(3,\)"):
        subject(nn.Identity(), workers=2, dim=1)(torch.ones(3))


@pytest.mark.if_subject_takes("shared", "workers")
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


@pytest.mark.beyond_contract("error messages")
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


@pytest.mark.if_subject_takes("workers")
@verifies
def test_equal_values_that_are_no_tensors_are_passed_on(subject):
    both = subject(Returning(lambda w, x: {"text": "a", "n": 3, "none": None, "x": x}), workers=2)(torch.arange(2))
    assert both == {"text": "a", "n": 3, "none": None, "x": both["x"]}


@pytest.mark.beyond_contract("error messages")
@verifies
def test_a_module_that_was_moved_away_is_refused(subject):
    replicated = subject(nn.Linear(1, 1), workers=2)
    replicated.module.to("meta")
    with pytest.raises(ValueError, match="'weight' is on meta"):
        replicated(torch.ones(2, 1))


def test_mappings_keep_their_kind():
    found = map_nested(lambda v, path: sum(v), [defaultdict(list, a=1), defaultdict(list, a=2)], "x")
    assert type(found) is defaultdict
    assert found["a"] == 3
    assert found["b"] == []


def test_copies_hold_the_structure_of_a_long_list_of_modules():
    layers = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(1100)])
    one, other = replicate(layers, [CPU, CPU])
    assert one is layers
    assert not any(a is b for a, b in zip(one.modules(), other.modules(), strict=True))
    assert not any(a is b for a, b in zip(one.parameters(), other.parameters(), strict=True))
