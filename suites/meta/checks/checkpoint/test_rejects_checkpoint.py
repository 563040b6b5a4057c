"""The check of resuming rejects trainings that lose state, names what is lost, and accepts the correct twin."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from pdlcheck.checks import check_resume, check_torn_files
from pdlcheck.errors import Inconclusive

from .trainers import Position, everything_of, honest_load, honest_save, put, read, trainer, write


def forgets(*names):
    def load(parts, path):
        put(parts, read(path, dist.get_rank()), names)

    return load


def reseeds(parts, path):
    honest_load(parts, path)
    torch.manual_seed(1)


def saves_no_stream_of_torch(parts, path):
    write(path, dist.get_rank(), {name: one for name, one in everything_of(parts).items() if name != "torch"})


def saves_an_older_stream(parts, path):
    older = torch.Generator().manual_seed(1).get_state()
    write(path, dist.get_rank(), everything_of(parts) | {"older": older})


def restores_an_older_stream(parts, path):
    honest_load(parts, path)
    torch.set_rng_state(read(path, dist.get_rank())["older"])


def loads_nothing_of_a_wrapped_model(parts, path):
    state = read(path, dist.get_rank())
    prefixed = {f"module.{name}": tensor for name, tensor in state["model"].items()}
    parts["model"].load_state_dict(prefixed, strict=False)
    put(parts, state, ["model"])


def loads_parameters_only(parts, path):
    state = read(path, dist.get_rank())
    names = dict(parts["model"].named_parameters())
    parts["model"].load_state_dict({k: v for k, v in state["model"].items() if k in names}, strict=False)
    put(parts, state, ["model"])


def loads_the_optimizer_on_rank_0(parts, path):
    state = read(path, dist.get_rank())
    put(parts, state, ["optimizer"] if dist.get_rank() else [])


def gives_all_the_streams_of_rank_0(parts, path):
    honest_load(parts, path)
    torch.set_rng_state(read(path, 0)["torch"])


def gives_all_but_the_weights_of_rank_0(parts, path):
    put(parts, read(path, 0), ["model"])
    parts["model"].load_state_dict(read(path, dist.get_rank())["model"])


def gives_all_the_weights_of_rank_0(parts, path):
    honest_load(parts, path)
    parts["model"].load_state_dict(read(path, 0)["model"])


def rounds(parts, path):
    honest_load(parts, path)
    for parameter in parts["model"].parameters():
        parameter.data = parameter.data.half().float()


def saves_and_draws(parts, path):
    honest_save(parts, path)
    torch.rand(1)


def saves_and_resets(parts, path):
    honest_save(parts, path)
    parts["optimizer"].state.clear()


def test_the_correct_twin_passes(world):
    check_resume(trainer(), world)


EXACTLY = r"; put back from the run without a stop, the training goes on exactly"
OF_RANK_0 = "; rank 1 got the state that rank 0 saved: each rank needs its own"
LOST = [
    ([forgets("optimizer")], "lost: optimizer" + EXACTLY, r"optimizer\['state'\]\[0\] is missing"),
    ([forgets("scheduler")], "lost: scheduler" + EXACTLY, r"scheduler\['last_epoch'\] is 0 instead of 3"),
    ([forgets("sampler")], "lost: sampler" + EXACTLY, r"sampler\['at'\] is 0 instead of 3"),
    ([forgets("torch")], f"of torch{EXACTLY}; the file holds them, load does not set them\n", ""),
    ([forgets("torch"), saves_no_stream_of_torch], f"lost: the random numbers of torch{EXACTLY}\n", ""),
    ([forgets("python")], "lost: the random numbers of Python" + EXACTLY, ""),
    ([forgets("numpy")], "lost: the random numbers of numpy" + EXACTLY, ""),
    ([forgets("optimizer", "numpy")], "lost: the random numbers of numpy and optimizer" + EXACTLY, ""),
    ([reseeds], rf"lost: the random numbers of torch{EXACTLY}; the file holds .* of torch\.manual_seed\(1\): it", ""),
    ([restores_an_older_stream, saves_an_older_stream], f"lost: the random numbers of torch{EXACTLY}\n", ""),
    ([loads_the_optimizer_on_rank_0], "rank 1 after step 4.*lost: optimizer" + EXACTLY + "\n", ""),
    ([gives_all_the_streams_of_rank_0], f"rank 1 .*lost: the random numbers of torch{EXACTLY}{OF_RANK_0}\n", ""),
    ([gives_all_but_the_weights_of_rank_0], f"rank 1 .*lost: .* and optimizer{EXACTLY}{OF_RANK_0}\n", ""),
    ([loads_nothing_of_a_wrapped_model], "it is what start made: load does not restore this parameter", ""),
    ([loads_parameters_only], "it is what start made: load does not restore this buffer", ""),
    (
        [gives_all_the_weights_of_rank_0],
        "it is what rank 0 held: each rank's own was not saved; where ranks are meant to hold the same, they differed "
        "before saving: check_replicas_in_sync says since when\n",
        "",
    ),
    ([rounds], "save does not write this parameter as it is, or load does not", ""),
    ([honest_load, saves_and_draws], "saving changes the training.*save draws random numbers", ""),
    ([honest_load, saves_and_resets], "saving changes the training.*save changes the state that it saves", ""),
]


@pytest.mark.parametrize(
    ("broken", "message", "evidence"), LOST, ids=[f"{i}-{m[:40]}" for i, (_, m, _) in enumerate(LOST)]
)
def test_check_resume_names_what_was_lost(world, broken, message, evidence):
    with pytest.raises(AssertionError, match=f"(?s){message}.*{evidence}") as caught:
        check_resume(trainer(*broken), world)
    text = str(caught.value)
    assert "after step 3" in text or "saving changes" in text
    assert f"world={world.name} world_size=2 saved_after=3 steps=6 seed=0" in text


def test_a_lost_state_that_equals_that_of_another_rank_is_not_taken_for_it(world):
    """Rank 0 has no count, and a lost count is 0 too."""

    def start():
        model, counts = nn.Linear(2, 1), {"steps": 0}

        def step(i):
            counts["steps"] += dist.get_rank()
            model.weight.data += 1 + counts["steps"]

        return model, step, lambda path: honest_save({"m": model}, path), lambda path: honest_load({"m": model}, path)

    with pytest.raises(AssertionError, match=f"(?s)rank 1 after step 4.*lost: the numbers in counts{EXACTLY}\n"):
        check_resume(start, world)


def test_check_resume_finds_an_iterator_that_starts_anew(world):
    steps = "what the steps before leave behind, such as the position in an iterator over the data"
    with pytest.raises(AssertionError, match=f"lost: {steps}; with those steps taken before loading, the training"):
        check_resume(trainer(iterator=True), world)
    told = f"lost: optimizer and scheduler and {steps}; the training does not go on exactly with optimizer and"
    with pytest.raises(AssertionError, match=f"(?s){told}.*; scheduler.'last_epoch'. is 0 instead of 3"):
        check_resume(trainer(forgets("optimizer", "scheduler"), iterator=True), world)


def test_check_resume_names_the_first_step_that_differs(world):
    def start():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5])
        parts = {"model": model}

        def step(i):
            optimizer.zero_grad()
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
            scheduler.step()

        return model, step, lambda path: honest_save(parts, path), lambda path: honest_load(parts, path)

    with pytest.raises(AssertionError, match=r"rank 0 after step 6 holds .* of parameter 'weight', without a stop"):
        check_resume(start, world)
    with pytest.raises(AssertionError, match=r"ends with the weights of a run without a stop, but optimizer\['pa"):
        check_resume(start, world, saved_after=3, steps=5)  # the learning rate has not been used yet


@pytest.mark.parametrize("forget", [(), ("averaged",)], ids=["saved", "lost"])
def test_check_resume_sees_what_no_weight_depends_on(world, forget):
    def start():
        model = nn.Linear(2, 1)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        clock = Position()
        clock.state_dict = time.monotonic_ns  # differs without a stop too
        parts = {"model": model, "averaged": averaged}

        def step(i):
            next(clock)
            for parameter in model.parameters():
                parameter.data += i
            averaged.update_parameters(model)

        def load(path):
            put(parts, read(path, dist.get_rank()), forget)

        return model, step, lambda path: honest_save(parts, path), load

    if not forget:
        check_resume(start, world)
        return
    with pytest.raises(AssertionError, match=r"(?s)but averaged\['n_averaged'\] holds other.*loaded: averaged, or"):
        check_resume(start, world)


def by_hand(container, forget=(), *, counts=False):
    """Return a training with an average, or a momentum, that only a plain dict or list holds."""

    def start():
        model = nn.Linear(2, 1)
        if container == "list":
            plain = [torch.zeros_like(p) for p in model.parameters()]
        else:
            plain = {} if container == "filled" else {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        initial = {name: p.detach().clone() for name, p in model.named_parameters()}  # a constant: no state
        losses = []  # a log; a resumed run has only its end
        parts = {"model": model}

        def step(i):
            model.zero_grad()
            loss = (model(torch.ones(3, 2)) - i).square().mean()
            loss.backward()
            losses.append(loss.detach() - initial["bias"])
            for place, (name, p) in enumerate(model.named_parameters()):
                key = place if container == "list" else name
                before = plain[key] if container != "filled" or key in plain else torch.zeros_like(p)
                plain[key] = 0.9 * before + p.grad
                p.data -= 0.1 * (plain[key] if counts else p.grad)

        def save(path):
            write(path, dist.get_rank(), everything_of(parts) | {"plain": plain})

        def load(path):
            state = read(path, dist.get_rank())
            put(parts, state)
            if "plain" not in forget:
                plain.clear()
                plain.update(state["plain"]) if isinstance(plain, dict) else plain.extend(state["plain"])

        return model, step, save, load

    return start


@pytest.mark.parametrize("container", ["dict", "list", "filled"])
def test_check_resume_sees_plain_dicts_and_lists_of_tensors(world, container):
    check_resume(by_hand(container), world)
    check_resume(by_hand(container, counts=True), world)
    first = r"plain\[0\]" if container == "list" else r"plain\['weight'\]"
    with pytest.raises(AssertionError, match=rf"(?s)but {first} holds other values.*not loaded: plain, or"):
        check_resume(by_hand(container, forget=["plain"]), world)
    with pytest.raises(AssertionError, match=rf"(?s)lost: plain{EXACTLY}.*{first} (holds other values|is missing)"):
        check_resume(by_hand(container, forget=["plain"], counts=True), world)


def test_check_resume_sees_a_dict_that_every_step_replaces(world):
    class Trainer:
        def __init__(self, forget):
            self.model, self.forget = nn.Linear(2, 1), forget
            self.average = {"weight": torch.rand(1, 2)}

        def step(self, i):
            self.model.weight.data += i
            self.average = {"weight": (self.average["weight"] + self.model.weight.detach()) / 2}

        def save(self, path):
            write(path, dist.get_rank(), {"model": self.model.state_dict(), "average": self.average})

        def load(self, path):
            state = read(path, dist.get_rank())
            self.model.load_state_dict(state["model"])
            self.average = self.average if self.forget else state["average"]

    def start(forget):
        trainer = Trainer(forget)
        return trainer.model, trainer.step, trainer.save, trainer.load

    check_resume(partial(start, False), world)
    with pytest.raises(AssertionError, match=r"(?s)but average.* holds other values.*not loaded: average, or"):
        check_resume(partial(start, True), world)


@pytest.mark.parametrize("updates", [2, 1], ids=["all", "rank 0"])
def test_check_resume_sees_an_average_that_one_rank_alone_updates(world, updates):
    class Trainer:
        def __init__(self):
            self.model = nn.Linear(2, 1)
            nn.init.ones_(self.model.weight)
            self.averaged = torch.optim.swa_utils.AveragedModel(self.model)

        def step(self, i):
            self.model.weight.data += i
            if dist.get_rank() < updates:
                self.averaged.update_parameters(self.model)

        def save(self, path):
            if dist.get_rank() == 0:
                torch.save({"model": self.model.state_dict(), "averaged": self.averaged.state_dict()}, path)
            dist.barrier()

        def load(self, path):
            state = torch.load(path, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.averaged.load_state_dict(state["averaged"])

    def start():
        torch.manual_seed(0)
        trainer = Trainer()
        return trainer.model, trainer.step, trainer.save, trainer.load

    if updates == 2:
        check_resume(start, world)
        return
    message = r"(?s)rank 1 ends with the weights .*averaged is what rank 0 held: each rank's own was not saved; where"
    with pytest.raises(AssertionError, match=message):
        check_resume(start, world)


@pytest.mark.parametrize("forget", [(), ("averaged",), ("scheduler",)], ids=["saved", "average", "scheduler"])
def test_check_resume_sees_what_an_object_of_the_program_holds(world, forget):
    class Trainer:
        def __init__(self):
            self.model = nn.Linear(2, 1)
            self.averaged = torch.optim.swa_utils.AveragedModel(self.model)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 4)

        def step(self, i):
            self.optimizer.zero_grad()
            self.model(torch.full((2, 2), i + 1.0)).sum().backward()
            self.optimizer.step()
            self.averaged.update_parameters(self.model)
            self.scheduler.step()

    def start():
        trainer = Trainer()

        def parts():
            return {name: getattr(trainer, name) for name in ("model", "averaged", "optimizer", "scheduler")}

        def load(path):
            put(parts(), read(path, dist.get_rank()), forget)

        return trainer.model, lambda i: trainer.step(i), lambda path: honest_save(parts(), path), load

    if not forget:
        check_resume(start, world)
        return
    told = {
        "averaged": r"(?s)but trainer\.averaged\['n_averaged'\] holds other.*loaded: trainer\.averaged, or",
        "scheduler": r"(?s)after step 5 holds.*lost: trainer\.scheduler; put back",
    }
    with pytest.raises(AssertionError, match=told[forget[0]]):
        check_resume(start, world)


def accumulating(parts_of_file):
    """Return a training whose optimizer steps in every second call."""

    def start():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        parts = {"model": model, "optimizer": optimizer}

        def step(i):
            model(torch.full((2, 2), i + 1.0)).square().sum().backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()

        def save(path):
            gradients = {name: p.grad for name, p in model.named_parameters()} if "gradients" in parts_of_file else {}
            write(path, dist.get_rank(), everything_of(parts) | {"gradients": gradients})

        def load(path):
            state = read(path, dist.get_rank())
            put(parts, state)
            for name, gradient in state["gradients"].items():
                model.get_parameter(name).grad = gradient

        return model, step, save, load

    return start


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_generator_counts_where_it_decides_the_order_of_a_loader(world, shuffle):
    """A loader draws from its generator when a pass begins, and a resumed run begins one pass more."""

    def start():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(dist.get_rank())
        data = torch.arange(8.0).view(4, 2) if not shuffle else torch.ones(4, 2)  # no weight shows the order
        loader = DataLoader(data, batch_size=1, shuffle=shuffle, generator=generator)
        parts, at = {"model": model, "optimizer": optimizer}, [None, 0]

        def step(i):
            if at[0] is None:
                at[0] = iter(loader)
                for _ in range(at[1]):
                    next(at[0])
            optimizer.zero_grad()
            model(next(at[0])).square().mean().backward()
            optimizer.step()
            at[1] += 1
            if at[1] == len(loader):
                at[:] = [None, 0]

        def save(path):
            write(path, dist.get_rank(), everything_of(parts) | {"at": at[1]})

        def load(path):
            state = read(path, dist.get_rank())
            put(parts, state)
            at[1] = state["at"]
            generator.get_state()  # makes load() refer to the generator, as code that seeds it anew does

        return model, step, save, load

    if not shuffle:
        check_resume(start, world, saved_after=5, steps=9)
        return
    with pytest.raises(AssertionError, match="not saved, or not loaded: generator"):
        check_resume(start, world, saved_after=5, steps=9)


def test_check_resume_names_gradients_that_were_accumulated(world):
    lost = accumulating([])
    check_resume(accumulating(["gradients"]), world)
    check_resume(lost, world, saved_after=2)  # no gradients are accumulated at this stop
    with pytest.raises(AssertionError, match="lost: the gradients of the model" + EXACTLY):
        check_resume(lost, world, saved_after=3)


def test_a_training_that_does_not_repeat_is_inconclusive(world):
    import os

    def noise(model):
        model[0].weight.data += int.from_bytes(os.urandom(2), "little")

    with pytest.raises(Inconclusive, match=r"two straight runs differ after step 3, on rank 0 in parameter '0.weight'"):
        check_resume(trainer(noise=noise), world)


def test_a_training_that_does_not_learn_is_inconclusive(world):
    with pytest.raises(Inconclusive, match="no parameter changed after step 3"):
        check_resume(trainer(learns=False), world)


def test_nothing_to_compare_is_an_error(world):
    with pytest.raises(ValueError, match="needs saved_after from 0 to below steps, got 3 and 3"):
        check_resume(trainer(), world, saved_after=3, steps=3)


@pytest.mark.parametrize("check", [check_resume, check_torn_files])
def test_a_start_that_makes_something_else_is_told(world, check):
    with pytest.raises(TypeError, match=r"start must return \(model, step, save, load\), it returned a tuple of 2"):
        check(lambda: trainer()()[:2], world)
