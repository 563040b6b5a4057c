"""The numbers by which CPython marks changed classes, and the joint subclasses that show changes of many at once."""

from __future__ import annotations

import abc

import pytest
import torch.distributed as dist
from torch import nn

from pdlcheck.worlds import get_world
from pdlcheck.worlds.simulated.process_state import patches, versions

pytestmark = pytest.mark.skipif(versions.IN_CLASS is None, reason="Python does not number the versions of classes")


def number(one):
    return versions.number_at(versions.of_class(one)).value


def test_a_change_resets_the_number_and_a_look_up_gives_another():
    class Layer(nn.Module):
        pass

    versions.look_up(Layer)
    before = number(Layer)
    assert before
    Layer.change = 1
    assert number(Layer) == 0
    versions.look_up(Layer)
    assert number(Layer) not in (0, before)


@pytest.fixture(scope="module")
def watched():
    get_world("sim").run(dist.barrier, world_size=2)
    return patches._watched


def test_the_change_of_any_watched_class_is_seen(watched):
    classes = [one for _, targets in watched._shown for one in targets if isinstance(one.target, type)]
    assert len(classes) > 150  # the layers of torch.nn alone
    watched.remember()
    for one in classes:
        one.target.pdlcheck_change = 1
        assert not watched.is_as_seen(), one.target
        assert one in watched.changed(), one.target
        del one.target.pdlcheck_change
        watched.remember()
        assert watched.is_as_seen()


def test_a_class_that_gets_no_number_any_more_is_compared_itself(watched, monkeypatch):
    """From Python 3.13 on, a class gets no number after 1000 changes."""
    linear = next(one for _, targets in watched._shown for one in targets if one.target is nn.Linear)
    monkeypatch.setattr(versions, "look_up", lambda target: None)
    nn.Linear.pdlcheck_change = 1
    del nn.Linear.pdlcheck_change
    watched.remember()
    assert not watched.is_as_seen()
    assert linear in watched.changed()
    monkeypatch.undo()
    watched.remember()
    assert watched.is_as_seen()


@pytest.fixture
def _own_joints(monkeypatch):
    monkeypatch.setattr(versions, "_joint", {})
    yield
    versions.joint_subclasses([])


@pytest.mark.usefixtures("_own_joints")
def test_classes_whose_orders_of_bases_conflict_have_several_joint_subclasses():
    class Mixin:
        pass

    class First(Mixin, nn.Module):
        pass

    class Last(nn.Module, Mixin):
        pass

    class Abstract(nn.Module, abc.ABC):
        pass

    class WithSlots(nn.Module):
        __slots__ = ("slot",)

    joint, joined = versions.joint_subclasses([First, Last, Abstract, WithSlots, nn.Module])
    assert joined == {First, Last, Abstract, nn.Module}
    assert len(joint) > 1
    for one in joined:
        for other in joint:
            versions.look_up(other)
        one.change = 1
        assert any(number(other) == 0 for other in joint)
        del one.change
    versions.joint_subclasses([])
    assert type.__subclasses__(Abstract) == []


@pytest.mark.usefixtures("_own_joints")
def test_making_one_calls_no_hook_of_the_bases():
    made = []

    class Base(nn.Module):
        def __init_subclass__(cls):
            made.append(cls.__name__)

    class Layer(Base):
        pass

    _, joined = versions.joint_subclasses([Base, Layer])
    assert joined == {Base, Layer}
    assert made == ["Layer"]
