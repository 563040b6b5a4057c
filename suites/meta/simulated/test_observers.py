"""The events of simulated operations, and the observers that subscribe to them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pdlcheck.worlds import get_world
from pdlcheck.worlds.simulated.cluster import Cluster
from pdlcheck.worlds.simulated.engine.observer import Observer, Subscriptions
from pdlcheck.worlds.simulated.observers.poison import Poison


class Watcher(Observer):
    """An observer that lists what it sees, with the rank."""

    def __init__(self):
        self.seen = []

    def before_post(self, operation, post):
        self.seen.append(("before_post", operation.signature.rank))

    def posting(self, signature):
        self.seen.append(("posting", signature.rank))

    def posted(self, work):
        self.seen.append(("posted", work.operation.signature.rank))

    def pending(self, work):
        self.seen.append(("pending", work.operation.signature.rank))

    def matched(self, works):
        self.seen.append(("matched", [work.operation.signature.rank for work in works]))

    def waited(self, work):
        self.seen.append(("waited", work.operation.signature.rank))

    def finished(self, work):
        self.seen.append(("finished", work.operation.signature.rank))

    def rank_ended(self, rank):
        self.seen.append(("rank_ended", rank))


def events_of(monkeypatch, program):
    """Return what a watcher sees of ``program`` on two ranks, under the schedule that prefers rank 0."""
    watcher = Watcher()
    usual = Cluster._observers
    monkeypatch.setattr(Cluster, "_observers", lambda *args: [*usual(*args), watcher])
    get_world("sim", schedule="first").run(program, world_size=2)
    return watcher.seen


def test_observers_see_an_operation_from_the_post_to_its_end(monkeypatch):
    post_of_0 = [("before_post", 0), ("posting", 0), ("posted", 0)]
    post_of_1 = [("before_post", 1), ("posting", 1), ("posted", 1), ("matched", [0, 1])]
    seen = events_of(monkeypatch, lambda: dist.all_reduce(torch.ones(1)))
    assert seen[:7] == post_of_0 + post_of_1
    assert [one for one in seen if one[1] == 0][3:] == [("waited", 0), ("finished", 0), ("rank_ended", 0)]


def test_only_an_operation_that_the_rank_does_not_wait_for_at_once_is_pending(monkeypatch):
    def program():
        dist.all_reduce(torch.ones(1), async_op=True).wait()

    assert ("pending", 0) in events_of(monkeypatch, program)


def test_the_engine_calls_only_the_events_that_an_observer_implements():
    poison = Poison(partial_sums=True)
    assert set(Poison.events) == {"finished", "pending"}
    events = Subscriptions([poison, Watcher()])
    assert len(events.finished) == 2
    assert len(events.posted) == 1
    assert events.polled == events.stuck == ()
