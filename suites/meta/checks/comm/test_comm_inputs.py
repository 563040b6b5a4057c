"""The checks of collectives pass strided and complex inputs unchanged, and refuse inputs that cannot be compared."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist

from pdlcheck import checks
from pdlcheck.checks import check_all_gather, check_all_reduce, check_broadcast, check_reduce_scatter, rank_results
from pdlcheck.errors import CheckFailed
from pdlcheck.worlds import get_world

WHOLE = [torch.arange(12.0).view(3, 4) + 100 * rank for rank in range(3)]
STRIDED = [whole[:, :2] for whole in WHOLE]
COMPLEX = [torch.complex(whole, whole + 1) for whole in WHOLE]


def summed(tensor, group=None):
    flat = tensor.contiguous().view(-1)
    dist.all_reduce(flat, group=group)
    return tensor.copy_(flat.view(tensor.shape))


def summed_in_what_may_be_a_copy(tensor, group=None):
    dist.all_reduce(tensor.reshape(-1), group=group)


def everyone(tensor, group=None):
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, tensor, group=group)
    return found


def gathered_by_storage(tensor, group=None):
    """Gather the first elements of the storage instead of those of the tensor."""
    own = tensor.as_strided((tensor.numel(),), (1,))
    found = [torch.empty(tensor.numel()) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    return [one.view(tensor.shape) for one in found]


def never_reduced(tensor, group=None):
    pass


def without_imaginary_parts(tensor, group=None):
    real = tensor.real.contiguous()
    dist.all_reduce(real, group=group)
    tensor.real = real


def test_check_all_reduce_gives_a_strided_view_as_it_is(world):
    check_all_reduce(summed, STRIDED, world)
    check_all_reduce(summed_in_what_may_be_a_copy, [whole.flatten() for whole in WHOLE], world)
    with pytest.raises(AssertionError, match=r"never reduced\n  case .* strides=\[\(4, 1\), \(4, 1\), \(4, 1\)\]"):
        check_all_reduce(summed_in_what_may_be_a_copy, STRIDED, world)


def summed_as_it_lies(tensor, group=None):
    """Add in the order of memory, and return a tensor of another order."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    dist.all_reduce(flat, group=group)
    return flat.view(tensor.shape)


@pytest.mark.parametrize(
    ("broken", "cause"),
    [
        (
            summed_in_what_may_be_a_copy,
            "its own input came back: with the same values in contiguous memory it is right;",
        ),
        (summed_as_it_lies, "it depends on the strides of its argument: with the same values in contiguous memory"),
    ],
)
def test_check_all_reduce_lays_contiguous_inputs_in_another_order(world, broken, cause):
    with pytest.raises(CheckFailed) as raised:
        check_all_reduce(broken, WHOLE, world)
    assert raised.value.cause.startswith(cause)


def test_an_all_reduce_that_refuses_views_passes(world):
    check_all_reduce(lambda tensor: dist.all_reduce(tensor.view(-1)), WHOLE, world)
    with pytest.raises(CheckFailed) as raised:
        check_all_reduce(never_reduced, WHOLE, world)
    assert "contiguous" not in raised.value.cause


def test_check_all_gather_gives_a_strided_view_as_it_is(world):
    check_all_gather(gathered_by_storage, WHOLE, world)
    with pytest.raises(AssertionError, match=r"rank 0 holds 2 at \(0, 1, 0\)"):
        check_all_gather(gathered_by_storage, STRIDED, world)


def test_check_all_reduce_compares_complex_numbers(world):
    check_all_reduce(summed, COMPLEX, world)
    with pytest.raises(AssertionError, match=r"rank 0 holds 1j at \(0, 0\), the sum over ranks is \(300\+303j\)"):
        check_all_reduce(never_reduced, COMPLEX, world)
    with pytest.raises(AssertionError, match=r"rank 0 holds \(300\+1j\) at \(0, 0\), the sum over ranks is"):
        check_all_reduce(without_imaginary_parts, COMPLEX, world)


@pytest.mark.parametrize(
    ("inputs", "ranks", "message"),
    [
        ([], None, "the check of summed needs an input for each rank, got none"),
        (WHOLE, [0, 1], r"the check of summed needs an input for each of the ranks \[0, 1\], got 3"),
        (
            [torch.ones(2), torch.ones(3)],
            None,
            r"needs inputs of one shape and dtype, rank 1 has \(3,\) torch.float32, 0 has \(2,\) torch.float32",
        ),
    ],
)
@pytest.mark.parametrize("check", [check_all_reduce, check_reduce_scatter])
def test_inputs_that_cannot_be_compared_are_refused(world, check, inputs, ranks, message):
    with pytest.raises(ValueError, match=message):
        check(summed, inputs, world, ranks=ranks)


def test_an_order_that_this_torch_does_not_keep_is_refused(monkeypatch):
    """The ranks are threads of this process, because they must see the patch."""
    monkeypatch.setattr(rank_results, "KEEPS_ORDER", False)
    world = get_world("sim")
    check_all_gather(everyone, WHOLE, world, ranks=[0, 1, 2])
    with pytest.raises(ValueError, match=r"sorts the ranks of a group, got ranks=\[2, 0, 1\]; give them in that order"):
        check_all_gather(everyone, WHOLE, world, ranks=[2, 0, 1])


def test_the_sender_is_one_of_the_ranks(world):
    with pytest.raises(ValueError, match="src is a place in inputs, 0 to 2, got 3"):
        check_broadcast(dist.broadcast, WHOLE, world, src=3)


def test_an_input_that_is_no_tensor_is_refused_by_name():
    with pytest.raises(TypeError, match=r"needs a tensor for each rank, rank 1 has a list; call torch.tensor on it"):
        check_all_reduce(dist.all_reduce, [torch.ones(2), [1.0, 1.0]], get_world("sim"))


CHECKS = [check for name, check in sorted(vars(checks).items()) if name.startswith("check_")]
OF_A_WORLD = [check for check in CHECKS if "world" in inspect.signature(check).parameters]


def test_most_checks_take_a_world():
    assert len(OF_A_WORLD) > 30


@pytest.mark.parametrize("check", OF_A_WORLD, ids=lambda check: check.__name__)
@pytest.mark.parametrize("given", ["sim", None, print], ids=str)
def test_what_is_no_world_is_told_so_by_every_check(check, given):
    """Users may pass the name of a world, or a function if they confuse the order of arguments."""
    with pytest.raises(TypeError, match=rf"{check.__name__} takes as world the fixture of that name, or what .* got"):
        check(world=given)


def test_what_python_says_of_a_call_stays(world):
    with pytest.raises(TypeError, match=r"check_all_reduce.* unexpected keyword argument 'seed'"):
        check_all_reduce(dist.all_reduce, [torch.ones(2)], world, seed=1)
    with pytest.raises(TypeError, match=r"check_all_reduce.* missing 2 required"):
        check_all_reduce(world=world)


def drawn(dtype, ranks=3):
    draws = torch.Generator().manual_seed(0)
    return [torch.randn(6, 2, generator=draws, dtype=torch.float64).to(dtype) for _ in range(ranks)]


def a_part(tensor, group=None):
    own = tensor.clone()
    dist.all_reduce(own, group=group)
    return own.tensor_split(dist.get_world_size(group))[dist.get_rank(group)]


def averaged(tensor, group=None):
    dist.all_reduce(tensor, group=group)
    tensor /= dist.get_world_size(group)


def without_the_last_rank(tensor, group=None):
    if dist.get_rank(group) == 2:
        tensor.zero_()
    dist.all_reduce(tensor, group=group)


def a_bit_too_large(tensor, group=None):
    dist.all_reduce(tensor, group=group)
    tensor.copy_(torch.nextafter(tensor, torch.full_like(tensor, torch.inf)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_sums_of_any_floats_may_be_added_in_any_order(world, dtype):
    inputs = [one.to(dtype) for one in drawn(torch.complex64 if dtype.is_complex else dtype)]
    check_all_reduce(summed, inputs, world)
    check_reduce_scatter(a_part, inputs, world)
    for broken, cause in ((averaged, "divided by world_size"), (without_the_last_rank, "rank 2 is missing")):
        with pytest.raises(AssertionError, match=rf"allowed +\S+ = world_size \* eps \* sum[^$]*cause .*{cause}"):
            check_all_reduce(broken, inputs, world)


def with_the_largest_number_for_inf(tensor, group=None):
    dist.all_reduce(tensor, group=group)
    torch.view_as_real(tensor).nan_to_num_(nan=torch.nan) if tensor.is_complex() else tensor.nan_to_num_(nan=torch.nan)


def with_zero_for_nan(tensor, group=None):
    dist.all_reduce(tensor, group=group)
    tensor[tensor.isnan()] = 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_an_input_that_is_not_finite_decides_its_own_element_alone(world, dtype):
    inputs = [one.to(dtype).clone() for one in drawn(torch.complex64 if dtype.is_complex else dtype)]
    inputs[0].view(-1)[0] = complex(torch.inf, 1) if dtype.is_complex else torch.inf
    inputs[1].view(-1)[1] = torch.nan
    check_all_reduce(summed, inputs, world)
    for broken in (with_the_largest_number_for_inf, with_zero_for_nan, without_the_last_rank):
        with pytest.raises(AssertionError, match=f"{broken.__name__}: rank 0 holds"):
            check_all_reduce(broken, inputs, world)


def test_a_sum_that_no_order_changes_is_exact(world):
    """Sums of sixteenths are exact too; beside a far larger number the order of addition matters."""
    sixteenths = [one / 16 for one in WHOLE]
    check_all_reduce(summed, sixteenths, world)
    for inputs in (WHOLE, sixteenths):
        with pytest.raises(AssertionError, match=r"wrong elements +12 of 12 on rank 0"):
            check_all_reduce(a_bit_too_large, inputs, world)
    check_all_reduce(a_bit_too_large, [sixteenths[0] + 2.0**20, *sixteenths[1:]], world)


def test_gathered_one_after_the_other_is_told_how_to_pass(world):
    def joined(tensor, group=None):
        return torch.cat(everyone(tensor, group), 1)

    check_all_gather(joined, WHOLE, world, dim=1)
    with pytest.raises(AssertionError, match="cause  concatenated along dimension 1, which dim=1 accepts"):
        check_all_gather(joined, WHOLE, world)
