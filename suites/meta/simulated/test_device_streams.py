"""Each simulated rank has its own random streams of devices, as a process has."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pdlcheck.worlds import get_world
from pdlcheck.worlds.simulated.process_state import device_streams
from pdlcheck.worlds.simulated.process_state.device_streams import DeviceStreams


@pytest.fixture
def stream(monkeypatch):
    """Return a CPU generator as the stream of a used device, because it has the same methods."""
    generator = torch.Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(device_streams, "_BUILT", True)
    monkeypatch.setattr(device_streams, "in_use", lambda: True)
    return generator


def draws(seed: int | None = None) -> list[int]:
    """Return numbers that are drawn on the device before and after another rank's turn."""
    stream = torch.cuda.default_generators[0]
    if seed is not None:
        torch.manual_seed(seed)
    drawn = []
    for _ in range(3):
        drawn.append(int(torch.randint(2**40, (), generator=stream)))
        dist.barrier()
    return drawn


def test_ranks_draw_numbers_of_their_own_which_repeat(stream):
    first, again = (get_world("sim", schedule=order).run(draws, world_size=3) for order in ("first", "random"))
    assert first == again
    assert len({number for drawn in first for number in drawn}) == 9
    assert get_world("sim", seed=1).run(draws, world_size=3) != first


def test_a_rank_that_seeds_draws_what_the_seed_says(stream):
    expected = torch.Generator().manual_seed(7)
    numbers = [int(torch.randint(2**40, (), generator=expected)) for _ in range(3)]
    assert get_world("sim").run(draws, 7, world_size=2) == [numbers] * 2


def test_runs_begin_where_the_one_that_set_up_has_ended(stream):
    """Tests with fixtures of a wide scope that draw numbers depend on it."""
    with get_world("sim").open(2) as ranks:
        expected = [outcome.value for outcome in ranks.run_bodies([lambda: draws() + draws()] * 2)]
        first = [outcome.value for outcome in ranks.run_bodies([draws] * 2, sets_up=True)]
        for _ in range(2):
            then = [outcome.value for outcome in ranks.run_bodies([draws] * 2)]
            assert [one + two for one, two in zip(first, then, strict=True)] == expected


def test_the_controllers_stream_stays_where_it_was(stream):
    stream.manual_seed(5)
    before = stream.get_state()
    get_world("sim").run(draws, world_size=2)
    assert torch.equal(stream.get_state(), before)


def test_without_streams_of_their_own_ranks_would_draw_from_one(stream, monkeypatch):
    """In the twin nothing is swapped, and a rank's seed applies to all."""
    monkeypatch.setattr(DeviceStreams, "put", lambda self: None)
    monkeypatch.setattr(DeviceStreams, "take", lambda self: None)
    stream.manual_seed(7)
    expected = torch.Generator().manual_seed(7)
    numbers = [int(torch.randint(2**40, (), generator=expected)) for _ in range(6)]
    first, second = get_world("sim", schedule="first").run(draws, world_size=2)
    assert sorted(first + second) == sorted(numbers)


@pytest.fixture
def later(monkeypatch):
    """Return a function that initialises an unused device as torch does, which applies the queued seeds."""
    generator, begun = torch.Generator(), []
    queue = type(device_streams._queue)() if device_streams._queue is not None else pytest.skip("torch has no queue")
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(device_streams, "_BUILT", True)
    monkeypatch.setattr(device_streams, "_queue", queue)
    monkeypatch.setattr(device_streams, "in_use", lambda: bool(begun))

    def use() -> torch.Generator:
        if not begun:
            for asked in filter(None, queue.get_calls()):
                asked[0]()
            begun.append(True)
        return generator

    use.queue = queue
    return use


def test_a_device_that_comes_into_use_on_a_rank_begins_with_the_seed_of_the_rank(later):
    def body() -> list[int]:
        torch.manual_seed(dist.get_rank() + 5)
        dist.barrier()
        later()
        return draws()

    later.queue.queue_seed_all(lambda: torch.cuda.default_generators[0].manual_seed(99), [])
    found = get_world("sim").run(body, world_size=2)
    for rank, drawn in enumerate(found):
        expected = torch.Generator().manual_seed(rank + 5)
        assert drawn == [int(torch.randint(2**40, (), generator=expected)) for _ in range(3)]
    asked = torch.Generator().manual_seed(99)
    assert torch.equal(later().get_state(), asked.get_state()), "the controller had asked for this seed before"


def test_where_no_device_comes_into_use_the_controllers_seeds_are_kept(later):
    later.queue.queue_seed_all(int, [])
    before = vars(later.queue).copy()
    get_world("sim").run(dist.get_rank, world_size=2)
    assert vars(later.queue) == before
