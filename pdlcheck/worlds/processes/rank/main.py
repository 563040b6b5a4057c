"""The main program of a rank: join the default group, then call each function that the controller sends."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import random
import resource
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from pdlcheck.compat.torch.c10d import world_state
from pdlcheck.compat.torch.stores import TCPStore
from pdlcheck.errors import PeerFailed
from pdlcheck.time_budgets import WATCHED_STILL_S
from pdlcheck.worlds.cuda_as_cpu.hint import hint_about_cuda, note_once
from pdlcheck.worlds.exceptions import shorten, text_of
from pdlcheck.worlds.forked import forked_children_end
from pdlcheck.worlds.journal import open_journal
from pdlcheck.worlds.observe import FROM_CALLBACK, declare_wrappers
from pdlcheck.worlds.outcome import ENDS_A_PROCESS, as_failure
from pdlcheck.worlds.processes.exchange.board import Board
from pdlcheck.worlds.processes.exchange.messages import Aftermath, Call, Changes, Done, Failed, Halted, Ready, Start
from pdlcheck.worlds.processes.exchange.payload import dump_error, dump_result, import_module_of, is_our_own, load_call
from pdlcheck.worlds.processes.exchange.settings import AS_TORCH_BEGINS, Settings, put
from pdlcheck.worlds.processes.exchange.warning_relay import recording_warnings
from pdlcheck.worlds.processes.rank import ending, import_time_rng, own_settings
from pdlcheck.worlds.processes.rank.absent_devices import leave_absent_devices_alone
from pdlcheck.worlds.processes.rank.backends import group_arguments, watch
from pdlcheck.worlds.processes.rank.batch_scheduling import take_turns
from pdlcheck.worlds.processes.rank.channel import Channel
from pdlcheck.worlds.processes.rank.coordinator import OperationCoordinator
from pdlcheck.worlds.processes.rank.cuda_on_cpu import (
    cuda_on_cpu,
    run_cuda_on_cpu,
    runs_cuda_on_cpu,
    select_first_device,
)
from pdlcheck.worlds.processes.rank.exit_callbacks import end, end_call
from pdlcheck.worlds.processes.rank.orphans import adopt_orphans
from pdlcheck.worlds.processes.rank.own_device import (
    loads_on_own_device,
    select_own_device,
    take_device,
    was_lost,
)
from pdlcheck.worlds.processes.rank.own_group import is_as_begun, join_group, leave_group, offer, offer_groups
from pdlcheck.worlds.processes.rank.own_rank import take_rank, users_code
from pdlcheck.worlds.processes.rank.own_store import meet_at
from pdlcheck.worlds.processes.rank.server import STACK_SIGNAL
from pdlcheck.worlds.processes.rank.watched_groups import begin_call
from pdlcheck.worlds.site import site_of
from pdlcheck.worlds.stack_position import user_traceback
from pdlcheck.worlds.standard_streams import flush_streams

__all__ = ["adopt", "begin", "fresh_state", "main", "take_place"]

_PR_SET_PDEATHSIG = 1
_PEER_HAS_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
)
_LIMITS = {
    which: resource.getrlimit(which)
    for which in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_DATA, resource.RLIMIT_NOFILE)
}


def main(fds: Sequence[int], missing: Mapping[str, str], server_pid: int, *, placed: bool = False) -> NoReturn:
    """Serve as one rank until the controller closes the pipe.

    Args:
        fds: descriptors of the pipe, stdout, stderr and the journal; then the board, if there is one; on the rank
            that hosts the store, last its listening socket.
        missing: preloaded modules that could not be imported, with the reason.
        server_pid: pid of the process that forked this one.
        placed: True in a fork of a template, which has taken the rank's place already.
    """
    begin(fds, server_pid)
    channel = Channel(Connection(fds[0]))
    start: Start = channel.receive()
    if not placed:
        take_place(start)
    coordinator = OperationCoordinator(
        start.rank, start.world_size, channel.send, Board(fds[4], start.world_size) if start.board else None
    )
    declare_wrappers(start.comm_wrappers)
    if start.take_turns:
        take_turns()
    if start.watch:
        coordinator.reminders.start()
        channel.on_message = coordinator.handle
        channel.still_s = WATCHED_STILL_S  # a watched wait ends by itself, so only the real group can block
        watch(start.backend, coordinator)
    channel.start()
    store = _join(start, fds[-1] if start.hosts_store else None)
    channel.send(Ready(missing))
    while (call := channel.next_call()) is not None:
        coordinator.begin(call.call)
        begin_call()
        _serve(call, start, store, channel, coordinator)
    del store  # this rank may host the store, so it must live until here
    end()


def begin(fds: Sequence[int], parent_pid: int) -> None:
    """Set up the process itself: its end with its parent, its journal and its output streams."""
    _die_with(parent_pid)
    adopt_orphans()
    open_journal(fds[3])
    # The streams are text files in every fork. The controller reads UTF-8, whatever the locale is. Like pytest's
    # capture, the streams must accept every character.
    sys.stdout.reconfigure(encoding="utf-8", errors="replace", line_buffering=True)  # type: ignore[union-attr]
    sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    faulthandler.enable(file=2, all_threads=False)
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)  # the main thread's stack comes last


def take_place(start: Start) -> None:
    """Take the place of the rank, as far as this needs no group: variables, rank, threads and device."""
    os.environ.update(start.variables)
    take_rank(start.rank, start.world_size)
    torch.set_num_threads(start.threads)
    own = take_device(start.device, start.backend, int(os.environ["LOCAL_RANK"]), cuda_as_cpu=start.cuda_as_cpu)
    leave_absent_devices_alone()
    if start.cuda_as_cpu:
        run_cuda_on_cpu(int(os.environ.get("LOCAL_WORLD_SIZE", start.world_size)), own, start.backend)


def _die_with(server_pid: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server_pid:
            os._exit(0)


def _join(start: Start, listening: int | None) -> TCPStore:
    store = TCPStore(
        start.host,
        start.port,
        start.world_size,
        is_master=start.hosts_store,
        wait_for_workers=False,
        master_listen_fd=listening,  # bound to that host only; torch's own socket would listen on every interface
    )
    meet_at(start.host, start.port)
    _init(start, store)
    offer_groups()
    return store


def _rejoin(call: int, start: Start, store: TCPStore) -> None:
    """Make a new default group on the same store; torch numbers the other groups from the start again."""
    leave_group()
    join_group()
    own = PrefixStore(f"call {call}", store)
    _init(start, own)


def _init(start: Start, store: Store) -> None:
    arguments = group_arguments(start.backend)
    dist.init_process_group(store=store, rank=start.rank, world_size=start.world_size, **arguments)


def _serve(call: Call, start: Start, store: TCPStore, channel: Channel, coordinator: OperationCoordinator) -> None:
    default_group, fn = dist.group.WORLD, None
    ending.begins()
    try:
        if call.group == "new":
            coordinator.is_beginning = True
            _rejoin(call.call, start, store)
            coordinator.is_beginning = False
            default_group = dist.group.WORLD
        elif call.group == "none":
            leave_group()
            default_group = None
        adopt(call.changes, start.variables)
        if call.seed is not None:
            own_settings.put_back()
            import_time_rng.begin(start.rank, call.seed)
        for module in call.modules:
            with import_time_rng.streams_of(module[1]), cuda_on_cpu():
                import_module_of(*module)
                if call.seed is not None:
                    own_settings.hold()
        fn, args, kwargs = load_call(call.payload, loads_on_own_device)
        if call.seed is not None:
            fresh_state(call.seed, start, call.settings)
        offer(default_group)
        with recording_warnings(call.filters) as heard:
            with contextlib.nullcontext() if is_our_own(fn) else users_code(), cuda_on_cpu():
                value = _called(fn, args, kwargs, coordinator)
            told = heard()
        ending.note_report()
        coordinator.end(failed=False)
        result = dump_result(value, start.rank)
        report: Any = Done(call.call, result, _aftermath(default_group, coordinator), told)
    except PeerFailed as error:
        ending.note_report()
        coordinator.end(failed=True)
        report = Halted(call.call, str(error), _aftermath(default_group, coordinator))
    except BaseException as error:  # every failure becomes a report, sys.exit and Ctrl-C included
        ending.note_report()
        if isinstance(error, MemoryError):
            traceback.clear_frames(error.__traceback__)  # free the function's objects, so that the report has room
        coordinator.end(failed=True)
        after = _aftermath(default_group, coordinator)
        if was_lost(error):
            after = replace(after, default_group=False)  # the group is of no use without the device
        report = _failed(call.call, error, start.rank, after)
    if fn is not None and not is_our_own(fn):
        end_call()
    flush_streams()
    channel.end(call.call, report)


def _called(fn: Any, args: Any, kwargs: Any, coordinator: OperationCoordinator) -> Any:
    try:
        with forked_children_end():
            return fn(*args, **kwargs)
    except RuntimeError as error:
        if coordinator.verdict is None or not text_of(error).startswith(FROM_CALLBACK):
            raise
        raise copy(coordinator.verdict).with_traceback(error.__traceback__) from None  # torch has wrapped the verdict


def adopt(changes: Changes, own: Mapping[str, str]) -> None:
    """Apply what has changed around the controller's code: import path, arguments, directory and environment.

    Args:
        changes: the changes since the last call.
        own: environment variables of the rank itself, which stay as they are.
    """
    if changes.path is not None:
        sys.path[:] = changes.path
    if changes.arguments is not None:
        sys.argv = [*changes.arguments]
    if changes.directory is not None:
        os.chdir(changes.directory)
    os.environ.update((name, value) for name, value in changes.set.items() if name not in own)
    for name in changes.unset:
        if name not in own:
            os.environ.pop(name, None)


def _aftermath(default_group: dist.ProcessGroup | None, coordinator: OperationCoordinator) -> Aftermath:
    return Aftermath(
        is_as_begun(default_group) and not coordinator.is_torn,
        dist.get_pg_count(),
        len(world_state().pg_map),
        tuple(coordinator.withdrawn),
        coordinator.has_open,
    )


def fresh_state(seed: int, start: Start, settings: Settings = AS_TORCH_BEGINS) -> None:
    """Reset the state that an earlier call may have left behind, and seed the rank's own random streams.

    Args:
        seed: the seed of all ranks; each rank derives a seed of its own from it.
        start: the first message to the rank.
        settings: torch's settings in the controller.
    """
    own_seed = seed * 10_007 + start.rank
    if torch.accelerator.current_accelerator() is None:
        torch.default_generator.manual_seed(own_seed)
    else:  # without an accelerator, this would record a stack trace for each kind of device, at every call
        torch.manual_seed(own_seed)
    select_own_device()
    select_first_device()
    random.seed(own_seed)
    np.random.seed(own_seed % 2**32)
    put(settings)
    for which, limits in _LIMITS.items():
        if resource.getrlimit(which) != limits:
            with contextlib.suppress(ValueError, OSError):  # a lowered hard limit cannot be raised again
                resource.setrlimit(which, limits)
    if torch.get_num_threads() != start.threads:
        torch.set_num_threads(start.threads)


def _failed(call: int, error: BaseException, rank: int, after: Aftermath) -> Failed:
    shorten(error)
    text = user_traceback(error)
    consequence = isinstance(error, RuntimeError) and any(words in text_of(error) for words in _PEER_HAS_GONE)
    if hint := hint_about_cuda(error, is_on=runs_cuda_on_cpu()):
        note_once(error, hint)
    if isinstance(error, ENDS_A_PROCESS):
        error = as_failure(rank, error, text)
    return Failed(
        call,
        dump_error(error),
        type(error).__name__,
        text_of(error),
        text,
        site_of(error),
        consequence,
        after,
    )
