"""The check of random streams rejects ranks that draw alike, names both lines, and accepts the correct twins."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pdlcheck.checks import check_random_streams
from pdlcheck.errors import Inconclusive
from pdlcheck.worlds import get_world


def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 1))


def step(model):
    model(torch.full((3, 4), float(dist.get_rank()))).sum().backward()


def seeded_alike():
    torch.manual_seed(7)
    return model()


def seeded_by_rank():
    torch.manual_seed(dist.get_rank())
    return model()


def seeded_by_rank_after_the_weights():
    made = seeded_alike()
    torch.manual_seed(7 + dist.get_rank())
    return made


def not_seeded():
    return model()


@pytest.mark.parametrize("make", [seeded_by_rank, seeded_by_rank_after_the_weights, not_seeded])
def test_ranks_with_streams_of_their_own_pass(make, world):
    check_random_streams(make, step, world, world_size=3)


def test_ranks_that_are_seeded_alike_are_rejected(world):
    with pytest.raises(AssertionError) as told:
        check_random_streams(seeded_alike, step, world)
    line = step.__code__.co_firstlineno + 1
    assert (
        "step: ranks 0 and 1 draw the same random numbers: rank 0 in aten.bernoulli_.float at "
        f"test_rejects_random_streams.py:{line}, rank 1 in aten.bernoulli_.float at "
    ) in str(told.value)
    assert "likely cause  torch.manual_seed(7) on both: add the rank to the seed" in str(told.value)
    assert "2 on rank 0, 2 on rank 1, 2 the same" in str(told.value)


def test_one_pair_of_ranks_is_enough(world):
    def make():
        torch.manual_seed(max(dist.get_rank(), 1))
        return model()

    def seeded_by_rank_in_rows():
        torch.manual_seed(dist.get_rank() % 2)
        return model()

    with pytest.raises(AssertionError, match="ranks 0 and 1 draw"):
        check_random_streams(make, step, world, world_size=3)
    with pytest.raises(AssertionError, match="ranks 0 and 2 draw"):
        check_random_streams(seeded_by_rank_in_rows, step, world, world_size=4)


def test_ranks_that_work_on_the_same_samples_may_draw_alike(world):
    def make():
        torch.manual_seed(dist.get_rank() // 2)
        return model()

    check_random_streams(make, step, world, world_size=4, same_samples=[(0, 1), (2, 3)])
    with pytest.raises(AssertionError, match="ranks 0 and 1 draw"):
        check_random_streams(make, step, world, world_size=4, same_samples=[(0, 3), (1, 2)])


def test_a_seed_that_is_set_anew_in_the_step_is_seen(world):
    def reseeds(model):
        torch.manual_seed(3)
        step(model)

    with pytest.raises(AssertionError, match="draw the same random numbers"):
        check_random_streams(seeded_by_rank, reseeds, world)


def test_seeds_of_steps_and_ranks_that_meet_are_told(world):
    def reseeds(add):
        def step(state):
            torch.manual_seed(10 + add(state["step"]))
            state["step"] += 1
            state["model"](torch.ones(3, 4))

        return step

    def make():
        return {"step": 0, "model": seeded_alike()}

    with pytest.raises(AssertionError, match=r"manual_seed\(11\) in step 1 of rank 0 and in step 0 of rank 1: sums of"):
        check_random_streams(make, reseeds(lambda step: step + dist.get_rank()), world)
    check_random_streams(make, reseeds(lambda step: step * dist.get_world_size() + dist.get_rank()), world)
    with pytest.raises(AssertionError, match=r"rank 0 draws in step 1 the random numbers of step 0: aten.ber") as told:
        check_random_streams(make, reseeds(lambda step: dist.get_rank()), world)
    assert "each step begins with one seed: add the step to it" in str(told.value)


class Divided(nn.Module):
    """A model with a layer that ranks hold whole, and one that is divided over ranks; each has its own seed."""

    def __init__(self, of_whole, of_part):
        super().__init__()
        self.whole, self.part = nn.Dropout(), nn.Dropout()
        self.seeds = {self.whole: of_whole, self.part: of_part}
        self.step = 0

    def forward(self, x):
        for module, seed in self.seeds.items():
            with torch.random.fork_rng():
                torch.manual_seed(1000 * self.step + seed)
                x = module(x)
        self.step += 1
        return x


def forward(model):
    model(torch.ones(3, 4))


def test_masks_of_a_divided_module_must_differ_where_others_may_be_alike(world):
    of_a_replica = {"same_samples": [(0, 1)], "divided": lambda model: [model.part]}
    check_random_streams(lambda: Divided(7, 100 + dist.get_rank()), forward, world, **of_a_replica)
    with pytest.raises(AssertionError, match=r"ranks 0 and 1 draw the same [^$]*each holds a part of a divided module"):
        check_random_streams(lambda: Divided(7, 100), forward, world, **of_a_replica)
    check_random_streams(lambda: Divided(7, 100), forward, world, same_samples=[(0, 1)])


def test_masks_of_a_whole_activation_must_be_equal_where_parts_are_divided(world):
    of_a_replica = {"same_samples": [(0, 1)], "divided": lambda model: [model.part]}
    told = (
        r"rank 0 draws .* that rank 1, which works on the same samples, does not draw: in aten.ber[\s\S]*seed the ranks"
    )
    with pytest.raises(AssertionError, match=told):
        check_random_streams(
            lambda: Divided(7 + dist.get_rank(), 100 + dist.get_rank()), forward, world, **of_a_replica
        )
    both_divided = of_a_replica | {"divided": lambda model: [model.part, model.whole]}
    check_random_streams(lambda: Divided(7 + dist.get_rank(), 100 + dist.get_rank()), forward, world, **both_divided)


def test_ranks_may_decide_together_by_a_global_generator(world):
    def make(seed):
        random.seed(seed)
        np.random.seed(seed)
        return seeded_by_rank()

    def drops_layers(model):
        if random.random() < 0.5 and np.random.rand() < 2:
            np.random.rand()
        step(model)

    check_random_streams(lambda: make(3), drops_layers, world, agreed=["random", "numpy.random"])
    with pytest.raises(AssertionError, match="draw the same random numbers: rank 0 in the random module"):
        check_random_streams(lambda: make(3), drops_layers, world)
    with pytest.raises(AssertionError, match=r"decide together by the random module, .* drawn other numbers"):
        check_random_streams(lambda: make(dist.get_rank()), drops_layers, world, agreed=["random"])
    check_random_streams(lambda: make(3), lambda made: random.random(), world, agreed=["random"])
    with pytest.raises(Inconclusive, match="draws no random numbers"):
        check_random_streams(lambda: make(3), lambda made: None, world, agreed=["random"])
    with pytest.raises(ValueError, match=r"takes as agreed 'random', 'numpy.random' and functions .*, got 'torch'"):
        check_random_streams(lambda: make(3), drops_layers, world, agreed=["torch"])


def test_a_stream_that_one_rank_is_behind_in_is_the_same_stream(world):
    """Rank 1 has drawn once before, so that its first draw is rank 0's second."""

    def make():
        made = seeded_alike()
        if dist.get_rank() == 1:
            made(torch.ones(3, 4))
        return made

    with pytest.raises(AssertionError, match="1 the same"):
        check_random_streams(make, step, world)


def test_masks_that_are_drawn_again_in_the_backward_pass_are_the_rank_s_own(world):
    def recomputes(model):
        x = torch.ones(3, 4, requires_grad=True)
        checkpoint(model, x, use_reentrant=False).sum().backward()

    check_random_streams(seeded_by_rank, recomputes, world)


def test_generators_of_the_program_s_own_may_agree(world):
    """The generators of samplers, for example, must agree."""

    def shuffles(model):
        list(DistributedSampler(range(10), seed=1))
        torch.randn(3, generator=torch.Generator().manual_seed(1))
        step(model)

    check_random_streams(seeded_by_rank, shuffles, world)


class Noisy(nn.Module):
    """A model that draws from generators of its own."""

    def __init__(self, seed, draw):
        super().__init__()
        self.draw = draw
        self.torchs = torch.Generator().manual_seed(seed)
        self.numpys = np.random.default_rng(seed)
        self.older = np.random.RandomState(seed)
        self.pythons = random.Random(seed)

    def all(self):
        return [self.torchs, self.numpys, self.older, self.pythons]


DRAWS = {
    "torch": (lambda made: torch.randn(3, generator=made.torchs), "aten.randn.generator of a generator at test_"),
    "dropout": (
        lambda made: torch.ones(3).bernoulli_(0.5, generator=made.torchs),
        "aten.bernoulli_.float of a generator at test_",
    ),
    "numpy": (lambda made: made.numpys.normal(size=3), "numpy.random.Generator, generator 0"),
    "older": (lambda made: made.older.rand(3), "numpy.random, generator 1"),
    "python": (lambda made: made.pythons.random(), "the random module, generator 2"),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_generators_of_the_program_s_own_count_if_it_says_so(world, kind):
    draw, told = DRAWS[kind]
    step = lambda made: made.draw(made)  # noqa: E731
    check_random_streams(lambda: Noisy(dist.get_rank(), draw), step, world, generators=Noisy.all)
    with pytest.raises(AssertionError, match=f"ranks 0 and 1 draw the same random numbers: rank 0 in {told}"):
        check_random_streams(lambda: Noisy(5, draw), step, world, generators=Noisy.all)
    with pytest.raises(Inconclusive, match=r"global generators in 2 step\(s\)"):
        check_random_streams(lambda: Noisy(5, draw), step, world)


def test_a_generator_that_begins_as_the_global_one_of_another_rank_is_the_same_stream(world):
    def make():
        torch.manual_seed(5 + dist.get_rank())
        return torch.Generator().manual_seed(6 - dist.get_rank())

    def step(generator):
        torch.rand(2) if dist.get_rank() else torch.rand(2, generator=generator)

    with pytest.raises(AssertionError, match=r"rank 0 in aten.rand.generator of a generator .*, rank 1 in aten.rand"):
        check_random_streams(make, step, world, generators=lambda generator: [generator])


def test_generators_that_draw_nothing_or_are_none_are_told(world):
    with pytest.raises(Inconclusive, match="global generators, nor of those that it was given, in 2 step"):
        check_random_streams(lambda: None, lambda made: None, world, generators=lambda made: [random.Random(0)])
    with pytest.raises(TypeError, match=r"takes generators of torch, NumPy or Python, such as .*, got int"):
        check_random_streams(lambda: None, lambda made: None, world, generators=lambda made: [7])


DATA = TensorDataset(torch.arange(4.0))


def in_a_common_order(model):
    """Draw one permutation on all ranks, and take this rank's share."""
    torch.randperm(4)[dist.get_rank() :: dist.get_world_size()]


def loaded(model):
    list(DataLoader(DATA, sampler=DistributedSampler(DATA)))


def loaded_by_workers(model):
    list(DataLoader(DATA, sampler=DistributedSampler(DATA), num_workers=1))


def loaded_in_any_order(model):
    list(DataLoader(DATA, shuffle=True))


@pytest.mark.parametrize("draw", [in_a_common_order, loaded])
def test_what_ranks_agree_by_does_not_count(draw, world):
    with pytest.raises(Inconclusive):
        check_random_streams(seeded_alike, draw, world)


def test_seeds_of_a_loader_s_workers_and_of_a_sampler_count():
    """The ranks are processes here, because simulated ranks are threads, which should not fork."""
    world = get_world("gloo")
    check_random_streams(seeded_by_rank, loaded_by_workers, world)
    for draw in (loaded_by_workers, loaded_in_any_order):
        with pytest.raises(AssertionError, match=r"aten\.random_.* at test_rejects_random_streams\.py"):
            check_random_streams(seeded_alike, draw, world)


def numpys_seeded(seed):
    np.random.seed(seed)


def numpys(made):
    np.random.rand(3)


def pythons_seeded(seed):
    random.seed(seed)


def pythons(made):
    random.random()


@pytest.mark.parametrize(
    ("seeded", "draw", "name"),
    [(numpys_seeded, numpys, "numpy.random"), (pythons_seeded, pythons, "the random module")],
)
def test_numpy_and_python_count_too(seeded, draw, name, world):
    check_random_streams(lambda: seeded(dist.get_rank()), draw, world)
    with pytest.raises(AssertionError, match=f"rank 0 in {name}, rank 1 in {name}") as told:
        check_random_streams(lambda: seeded(0), draw, world)
    assert "likely cause  the generator is in one state on both: add the rank to what it is" in str(told.value)


def test_a_step_that_draws_nothing_is_inconclusive(world):
    def evaluates(model):
        model.eval()(torch.ones(3, 4))

    with pytest.raises(Inconclusive, match="is the model in training mode"):
        check_random_streams(seeded_alike, evaluates, world)


def test_dropout_of_nothing_draws_nothing(world):
    def make():
        torch.manual_seed(0)
        return nn.Dropout(0.0)

    with pytest.raises(Inconclusive):
        check_random_streams(make, lambda made: made(torch.ones(3)), world)


@pytest.mark.parametrize(("sizes", "message"), [((1, 2), "world_size must be 2 or more, got 1"), ((2, 0), "got 0$")])
def test_arguments_that_cannot_be_are_named(sizes, message, world):
    with pytest.raises(ValueError, match=message):
        check_random_streams(seeded_alike, step, world, world_size=sizes[0], steps=sizes[1])
