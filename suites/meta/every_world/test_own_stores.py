"""Stores that a program makes for itself, by an address or a file."""

from __future__ import annotations

import gc
import os
import socket
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from pdlcheck.errors import Deadlock, Unsupported
from pdlcheck.worlds import get_world

LIMIT = timedelta(seconds=20)
SHORT = timedelta(seconds=0.5)


@pytest.fixture
def port():
    """Return a port on which no process listens."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return own.getsockname()[1]


def make(port, timeout=LIMIT, **options):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0, timeout=timeout, **options)


def exchanged(store):
    """Exchange values with neighbours through the store; no rank leaves before all have theirs."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store.set(f"of {rank}", str(rank))
    left = int(store.get(f"of {(rank - 1) % world_size}"))
    dist.barrier()
    return left


def over_tcp(port):
    return exchanged(make(port))


def by_the_name_imported(port):
    return exchanged(TCPStore("localhost", port, dist.get_world_size(), dist.get_rank() == 0, LIMIT))


def behind_a_prefix(port):
    return exchanged(dist.PrefixStore("outer", dist.PrefixStore("inner", make(port))))


def of_a_clone(port):
    store = make(port)
    return exchanged(store.clone())


def nobody_is_waited_for(port):
    return exchanged(make(port, wait_for_workers=False))


def on_a_port_that_the_master_was_given(_):
    told = [None]
    if dist.get_rank() == 0:
        store = make(0, wait_for_workers=False)
        told = [store.port]
    dist.broadcast_object_list(told, 0)
    if dist.get_rank():
        store = make(told[0], wait_for_workers=False)
    assert store.port == told[0] > 0
    assert store.host == "127.0.0.1"
    return exchanged(store)


def one_after_another(port):
    for _ in range(3):
        store = make(port)
        left = exchanged(store)
        assert store.num_keys() == dist.get_world_size() + 1  # one key counts the ranks
        dist.barrier()
        del store
        dist.barrier()
    return left


def given_to_init_process_group(port):
    dist.destroy_process_group()
    rank = int(os.environ["RANK"])
    store = dist.TCPStore("127.0.0.1", port, 3, rank == 0, LIMIT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    left = exchanged(store)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 3
    return left


def in_place_of_the_one_there(port):
    """Pass a store to init_process_group, which takes the existing group the first time."""
    store = make(port)
    dist.init_process_group("gloo", store=store, rank=dist.get_rank(), world_size=3)
    return exchanged(store)


TCP = [
    over_tcp,
    by_the_name_imported,
    behind_a_prefix,
    of_a_clone,
    nobody_is_waited_for,
    on_a_port_that_the_master_was_given,
    one_after_another,
    given_to_init_process_group,
    in_place_of_the_one_there,
]


@pytest.mark.parametrize("program", TCP, ids=lambda program: program.__name__)
def test_a_tcp_store(world, port, program):
    assert world.run(program, port, world_size=3) == [2, 0, 1]


@pytest.mark.parametrize("schedule", ["first", *(f"random:{seed}" for seed in range(6))])
def test_a_tcp_store_under_every_schedule(port, schedule):
    world = get_world("sim", schedule=schedule)
    assert world.run(over_tcp, port, world_size=3) == [2, 0, 1]
    assert world.run(one_after_another, port, world_size=3) == [2, 0, 1]


def over_a_file(path):
    store = dist.FileStore(str(path), dist.get_world_size())
    assert (store.path, path.exists()) == (str(path), True)
    return exchanged(store)


def test_a_file_store(world, tmp_path):
    assert world.run(over_a_file, tmp_path / "store", world_size=3) == [2, 0, 1]
    assert world.run(over_a_file, tmp_path / "store", world_size=3) == [2, 0, 1]
    if world.name == "sim":
        assert not (tmp_path / "store").exists()  # the last rank removes it


def everything(port):
    """Return the results of all methods, on rank 0."""
    store = make(port, SHORT, wait_for_workers=False) if dist.get_rank() == 0 else None
    told = [] if store is None else [*_of(store), *_of_queues(store), sorted(store.list_keys())]
    dist.barrier()
    return told


def everything_behind_a_prefix(port):
    store = dist.PrefixStore("some", make(port, SHORT, wait_for_workers=False)) if dist.get_rank() == 0 else None
    told = [] if store is None else _of(store)
    dist.barrier()
    return told


def everything_of_a_file(path):
    store = dist.FileStore(str(path), dist.get_world_size())
    store.set_timeout(SHORT)
    told = [] if dist.get_rank() else _of(store)
    dist.barrier()
    return told


def _of(store):
    told = [
        store.timeout,
        store.set("key", "value"),
        store.set("of bytes", b"value"),
        store.get("key"),
        store.add("number", 3),
        store.add("number", -1),
        store.get("number"),
        store.append("key", "s"),
        store.append("other", "new"),
        store.multi_set(["one", "two"], ["1", "2"]),
        store.multi_get(["key", "one", "two", "other"]),
        store.compare_set("compared", "", "first"),
        store.compare_set("compared", "wrong", "second"),
        store.compare_set("compared", "first", "third"),
        store.compare_set("missing", "wrong", "second"),
        store.check(["key", "number"]),
        store.check(["key", "missing"]),
        store.delete_key("two"),
        store.delete_key("two"),
        store.wait(["key", "one"]),
        store.wait(["key"], LIMIT),
        store.num_keys(),
        store.has_extended_api(),
        store.clone().get("key"),
        store.clone().timeout,
        isinstance(store, dist.Store),
        [isinstance(store, kind) for kind in (dist.TCPStore, dist.FileStore, dist.PrefixStore, dist.HashStore)],
    ]
    for call in (store.get, lambda key: store.wait([key]), lambda key: store.multi_get([key])):
        try:
            call("never set")
        except RuntimeError as error:
            told.append("timeout" in str(error).lower())
    try:
        store.set("key", 3)
    except TypeError:
        told.append("no number")
    if hasattr(store, "barrier"):  # from torch 2.13 on
        store.barrier("of one", 1)
        try:
            store.barrier("of two", 2, SHORT)
        except RuntimeError:
            told.append("not all came")
    return told


def _of_queues(store):
    told = [store.queue_push("queue", "1"), store.queue_push("queue", b"2"), store.queue_len("queue")]
    told += [store.check(["queue"]), store.wait(["queue"]), store.queue_pop("queue"), store.queue_pop("queue", False)]
    told += [store.queue_len("queue"), store.queue_len("missing")]
    for block in (True, False):
        try:
            store.queue_pop("missing", block)
        except dist.DistStoreError as error:
            told.append(type(error).__name__)
    return told


@pytest.mark.parametrize("program", [everything, everything_behind_a_prefix], ids=["alone", "behind a prefix"])
def test_all_methods_do_as_torchs(port, program):
    sim, gloo = get_world("sim"), get_world("gloo")
    told = gloo.run(program, port, world_size=2)
    keys = slice(-2 if program is everything else len(told[0]))  # torch's barrier has its own keys
    assert [one[keys] for one in sim.run(program, port, world_size=2)] == [one[keys] for one in told]


def test_all_methods_of_a_file_do_as_torchs(tmp_path):
    sim, gloo = get_world("sim"), get_world("gloo")
    told = gloo.run(everything_of_a_file, tmp_path / "of processes", world_size=2)
    assert sim.run(everything_of_a_file, tmp_path / "simulated", world_size=2) == told


# -- what does not come --------------------------------------------------------------------------


def waits_for_a_key_that_never_comes(port):
    store = make(port)
    store.set_timeout(SHORT)  # not the limit to join: a busy machine may need longer to connect
    if dist.get_rank() == 1:
        with pytest.raises(dist.DistStoreError, match=r"wait timeout after 500ms, keys: .*never set"):
            store.get("never set")
        with pytest.raises(dist.DistStoreError, match=r"wait timeout after 200ms, keys: .*never set"):
            store.wait(["never set"], timedelta(seconds=0.2))
    dist.barrier()


def has_no_master(port):
    if dist.get_rank() == 1:
        with pytest.raises(dist.DistNetworkError, match=r"timed out after .* trying to connect to \(127.0.0.1, "):
            make(port, timedelta(seconds=1))


def has_too_few_clients(port):
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistStoreError, match=r"Timed out after .* seconds waiting for clients. 1/2 clients"):
            make(port, timedelta(seconds=1))


def has_two_masters(port):
    if dist.get_rank() == 0:
        first = dist.TCPStore("127.0.0.1", port, 1, True)
        with pytest.raises(dist.DistNetworkError, match=f"port: {port}, .*EADDRINUSE"):
            dist.TCPStore("127.0.0.1", port, 1, True)
        assert first.port == port
        several = dist.TCPStore("127.0.0.1", 0, 1, True, multi_tenant=True)
        several.set("key", "value")
        assert dist.TCPStore("127.0.0.1", several.port, 1, True, multi_tenant=True).get("key") == b"value"


FAULTY = [waits_for_a_key_that_never_comes, has_no_master, has_too_few_clients, has_two_masters]


@pytest.mark.parametrize("program", FAULTY, ids=lambda program: program.__name__)
def test_errors_are_torchs(world, port, program):
    world.run(program, port, world_size=2)


def waits_for_ever(port):
    store = make(port, timedelta(seconds=300))
    store.get("never set")


def never_joins(port):
    if dist.get_rank() == 0:
        make(port, timedelta(seconds=300))
    dist.barrier()


def test_waits_without_a_limit_are_a_deadlock_on_simulated_ranks(port):
    with pytest.raises(Deadlock, match=r"ranks 0, 1: blocked in store.wait for 'never set'"):
        get_world("sim").run(waits_for_ever, port, world_size=2)
    with pytest.raises(Deadlock, match=f"rank 0: blocked in TCPStore at port {port}, for 2 workers to join"):
        get_world("sim").run(never_joins, port, world_size=2)


def test_after_a_failure_the_port_is_free(port):
    world = get_world("sim")
    with world.open(2) as ranks:
        with pytest.raises(Deadlock) as kept:  # the error's frames hold the store
            ranks.run(waits_for_ever, port)
        assert ranks.run(over_tcp, port) == [1, 0]
    assert kept.value


# -- other threads -------------------------------------------------------------------------------


def test_the_controller_has_torchs_own(port):
    get_world("sim").run(over_tcp, port, world_size=2)
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    assert type(store) is dist.TCPStore is TCPStore
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    client.set("key", "value")
    assert store.get("key") == b"value"


def test_simulated_ranks_find_a_server_of_the_controller():
    server = dist.TCPStore("127.0.0.1", 0, 1, True)

    def program(port):
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)
        return store.add("visitors", 1)

    assert sorted(get_world("sim").run(program, server.port, world_size=2)) == [1, 2]
    assert server.get("visitors") == b"2"


class Named(dist.TCPStore):
    """A store class that a program may derive."""


def test_a_class_derived_from_torchs_is_torchs(port):
    assert get_world("sim").run(lambda: type(Named("127.0.0.1", 0, 1, True)) is Named, world_size=1) == [True]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_of_a_rank_that_waits_in_its_store_ends_the_run(port):
    def program():
        store = make(port)
        thread = threading.Thread(target=store.get, args=("key",))
        thread.start()
        thread.join()

    with pytest.raises(Unsupported, match=r"a thread that rank . started communicates"):
        get_world("sim").run(program, world_size=2)


def test_stores_leave_nothing_behind(port):
    def program():
        store = dist.PrefixStore("some", make(port))
        store.set("key", "value")

    for _ in range(3):
        get_world("sim").run(program, world_size=2)
        get_world("sim").run(given_to_init_process_group, port, world_size=3)
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one).__name__ == "OwnTCPStore" and one.port == port]
