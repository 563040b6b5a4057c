"""The process world when ranks fail: the first cause is raised, no rank hangs, the next call works."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import RankDied, RankFailed, RankTimeout
from pdlcheck.worlds.outcome import Raised, Returned, Stopped
from pdlcheck.worlds.processes import ProcessWorld
from pdlcheck.worlds.processes.controller import forkserver
from pdlcheck.worlds.processes.rank.channel import Channel

from ..clone import ROOT
from ..still_running import is_running, state_of, still_running
from .hoarding import hoard, limit_memory

LINE = os.path.basename(__file__)


@pytest.fixture(scope="module", params=[True, False], ids=["watched", "plain"])
def processes(request: pytest.FixtureRequest) -> Iterator[ProcessWorld]:
    forkserver.start(preload=["pytest"])
    world = ProcessWorld(timeout_s=20, watch=request.param)
    yield world
    world.close()


def on_rank_1(action: Callable[[], Any]) -> Callable[[], None]:
    """Return a function for every rank that runs ``action`` on rank 1 while the others wait for it."""

    def body() -> None:
        if dist.get_rank() == 1:
            action()
        dist.all_reduce(torch.ones(1))

    return body


def fail(words: str) -> None:
    raise AssertionError(words)


def assert_heals(world: ProcessWorld) -> None:
    def total() -> float:
        x = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(x)
        return x.item()

    assert world.run(total, world_size=2) == [3.0, 3.0]


def test_the_assertion_of_one_rank_is_raised_while_the_others_wait_for_it(processes):
    processes.run(dist.get_rank, world_size=2)
    start = time.monotonic()
    with pytest.raises(AssertionError, match="my weight is 3") as caught:
        processes.run(on_rank_1(lambda: fail("my weight is 3")), world_size=2)
    assert time.monotonic() - start < processes.timeout_s / 2
    story = "\n".join(caught.value.__notes__)
    assert "rank 1 of 2 raised this" in story
    assert "in fail\n    raise AssertionError(words)" in story
    assert "pdlcheck/worlds" not in story
    assert "rank 0 was stopped in all_reduce" in story
    assert f"{LINE}:" in story
    assert_heals(processes)


def test_outcomes_tell_how_every_rank_ended(processes):
    def body() -> int:
        if dist.get_rank() == 2:
            time.sleep(0.1)  # after rank 0 has returned
            raise KeyError("lr")
        if dist.get_rank() == 1:
            dist.recv(torch.empty(1), src=2)
        return 7

    with processes.open(3) as ranks:
        first, second, third = ranks.outcomes(body)
    assert first == Returned(0, 7)
    assert isinstance(second, Stopped)
    assert second.where.startswith("in recv")
    assert isinstance(third, Raised)
    assert isinstance(third.error, KeyError)


def test_a_failure_on_every_rank_is_told_as_the_same(processes):
    with pytest.raises(ZeroDivisionError) as caught:
        processes.run(lambda: 1 // 0, world_size=2)
    assert caught.value.__notes__[0] == "ranks 0, 1 of 2 raised this"


@pytest.mark.parametrize(
    ("action", "words", "exitcode"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 was killed by SIGKILL", -signal.SIGKILL),
        (lambda: os._exit(3), "rank 1 ended its process with exit code 3", 3),
        (lambda: os._exit(0), "rank 1 ended its process with exit code 0", 0),
    ],
    ids=["SIGKILL", "exit-3", "exit-0"],
)
def test_a_rank_that_dies_is_named_at_once(processes, action, words, exitcode):
    processes.run(dist.get_rank, world_size=2)
    start = time.monotonic()
    with pytest.raises(RankDied, match=words) as caught:
        processes.run(on_rank_1(action), world_size=2)
    assert time.monotonic() - start < processes.timeout_s / 2
    assert (caught.value.rank, caught.value.exitcode) == (1, exitcode)
    assert_heals(processes)


def test_what_a_dying_rank_wrote_to_stderr_is_quoted(processes):
    def crash() -> None:
        os.write(2, b"from C++: shapes differ\n")
        os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(RankDied, match="SIGSEGV") as caught:
        processes.run(on_rank_1(crash), world_size=2)
    assert "from C++: shapes differ" in str(caught.value)
    assert "in crash" in caught.value.stderr  # the Python stack, from faulthandler
    assert_heals(processes)


def test_a_rank_whose_listening_thread_fails_dies_with_the_reason(processes):
    def fail(channel: Channel, message: Any) -> None:
        raise LookupError(f"no place for {type(message).__name__}")

    def break_the_thread() -> None:
        if dist.get_rank() == 1:
            assert callable(Channel._handle)
            Channel._handle = fail

    processes.run(break_the_thread, world_size=2)
    with pytest.raises(RankDied, match="rank 1 ended its process with exit code 70") as caught:
        processes.run(dist.get_rank, world_size=2)
    assert "LookupError: no place for Call" in caught.value.stderr
    assert_heals(processes)


def test_a_rank_whose_controller_goes_while_it_answers_ends_quietly():
    program = """
from multiprocessing import Pipe
from pdlcheck.worlds.processes.rank.channel import Channel
from pdlcheck.worlds.processes.exchange.messages import Ping, put
controller, rank = Pipe()
put(controller, Ping())
controller.close()
channel = Channel(rank)
channel.start()
assert channel.next_call() is None
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=str(ROOT), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_sys_exit_of_a_rank_does_not_end_the_controller(processes):
    with pytest.raises(RankFailed, match=r"rank 1 called sys.exit\(4\)"):
        processes.run(on_rank_1(lambda: sys.exit(4)), world_size=2)
    assert_heals(processes)


class Odd(Exception):
    """An exception whose arguments contain an object that cannot be pickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one, two, threading.Lock())

    def __str__(self) -> str:
        return f"{self.args[0]} and {self.args[1]}"


def test_an_exception_that_cannot_travel_is_quoted(processes):
    def body() -> None:
        raise Odd(1, 2)

    with pytest.raises(RankFailed, match="rank 0 raised Odd: 1 and 2") as caught:
        processes.run(body, world_size=1)
    assert "raise Odd(1, 2)" in caught.value.traceback


def test_a_skip_on_the_ranks_is_a_skip_in_the_controller(processes):
    with pytest.raises(pytest.skip.Exception, match="needs 4 GPUs"):
        processes.run(lambda: pytest.skip("needs 4 GPUs"), world_size=2)


def test_a_result_that_cannot_travel_is_named(processes):
    with pytest.raises(TypeError, match="rank 0 returned a generator that cannot be sent to the controller"):
        processes.run(lambda: (i for i in range(2)), world_size=1)
    told = r"rank 0 returned a dict that cannot be sent to the controller: its \['k'\]\[1\] is a lock: TypeError: "
    with pytest.raises(TypeError, match=told):
        processes.run(lambda: {"k": [1, threading.Lock()]}, world_size=1)


def test_an_argument_that_cannot_travel_is_named_before_anything_runs(processes):
    with pytest.raises(TypeError, match="argument 1 of print cannot be sent to the ranks"):
        processes.run(print, 1, threading.Lock(), world_size=2)
    with pytest.raises(TypeError, match="argument 'end' of print cannot be sent to the ranks"):
        processes.run(print, end=threading.Lock(), world_size=2)
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"the function .*<lambda> cannot be sent to the ranks: its lock is a lock: "):
        processes.run(lambda: lock.locked(), world_size=2)
    with pytest.raises(TypeError, match="a world cannot be sent to its ranks"):
        processes.run(lambda: processes.run(print, world_size=2), world_size=2)


def test_a_rank_that_takes_too_long_is_shown_with_its_stack():
    def slow() -> None:
        if dist.get_rank() == 1:
            time.sleep(60)

    world = ProcessWorld(timeout_s=0.5)
    try:
        world.run(dist.get_rank, world_size=2)
        start = time.monotonic()
        with pytest.raises(RankTimeout, match=r"no result within 0.5 s from rank 1 of 2") as caught:
            world.run(slow, world_size=2)
        assert time.monotonic() - start < 30
        assert caught.value.ranks[0] == "rank 0: has returned"
        assert caught.value.ranks[1].startswith("rank 1: busy at ")
        assert "time.sleep(60)" in caught.value.stacks[0]
        assert_heals(world)
    finally:
        world.close()


def test_a_rank_stuck_where_python_cannot_run_is_shown_with_its_stack():
    def stuck() -> None:
        import ctypes

        while True:
            ctypes.PyDLL(None).sleep(60)  # keeps the interpreter lock

    world = ProcessWorld(timeout_s=0.3)
    try:
        world.run(dist.get_rank, world_size=1)
        with pytest.raises(RankTimeout) as caught:
            world.run(stuck, world_size=1)
        assert caught.value.ranks[0].startswith("rank 0: busy outside Python")
        head, *_, innermost = caught.value.stacks[0].splitlines()
        assert head == "stack of rank 0, innermost call last:"
        assert innermost.endswith(", in stuck")
        assert "rank.py" not in caught.value.stacks[0]
    finally:
        world.close()


@pytest.mark.parametrize("how", ["default", "unregistered", "executed"])
def test_a_rank_that_asking_for_its_stack_would_end_is_not_asked(how):
    def stuck() -> None:
        import ctypes
        import faulthandler

        if how == "default":
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        elif how == "unregistered":
            faulthandler.unregister(signal.SIGUSR1)
        else:
            os.execvp("sleep", ["sleep", "60"])
        ctypes.PyDLL(None).sleep(60)

    world = ProcessWorld(timeout_s=0.5)
    try:
        world.run(dist.get_rank, world_size=1)
        with pytest.raises(RankTimeout) as caught:
            world.run(stuck, world_size=1)
        assert caught.value.ranks[0].startswith("rank 0: busy outside Python")
        assert caught.value.stacks == ["stack of rank 0: it cannot be asked"]
    finally:
        world.close()


def test_a_rank_that_returns_while_the_stacks_are_asked_for_is_too_late():
    def late() -> None:
        import ctypes

        ctypes.PyDLL(None).sleep(60)  # the signal that asks for the stack ends it

    world = ProcessWorld(timeout_s=0.3)
    try:
        world.run(dist.get_rank, world_size=1)
        with pytest.raises(RankTimeout) as caught:
            world.run(late, world_size=1)
        assert caught.value.ranks == ["rank 0: has returned, too late"]
    finally:
        world.close()


@pytest.mark.parametrize("watch", [True, False], ids=["watched", "plain"])
def test_a_stopped_rank_is_told_from_those_that_wait_for_it(watch):
    world = ProcessWorld(timeout_s=0.5, watch=watch)
    try:
        world.run(dist.get_rank, world_size=2)
        with pytest.raises(RankTimeout) as caught:
            world.run(on_rank_1(lambda: os.kill(os.getpid(), signal.SIGSTOP)), world_size=2)
        assert caught.value.ranks[0].startswith("rank 0: busy in all_reduce")
        assert caught.value.ranks[1] == "rank 1: stopped by SIGSTOP or SIGTSTP"
        assert caught.value.stacks[1] == "stack of rank 1: it cannot be asked"
        assert_heals(world)
    finally:
        world.close()


def hoard_little() -> None:
    limit_memory(2**26)
    hoard()


def test_a_rank_without_memory_can_still_say_so(processes):
    before = processes.pids(2)
    with pytest.raises(MemoryError) as caught:
        processes.run(on_rank_1(hoard_little), world_size=2)
    assert "rank 1 of 2 raised this" in caught.value.__notes__
    assert not set(before) & set(processes.pids(2)), "these processes may run out of memory again"
    assert_heals(processes)


def test_limits_that_a_function_has_set_end_with_it(processes):
    def limit() -> tuple[int, int]:
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, limit()[1]))

    (before,) = processes.run(limit, world_size=1)
    processes.run(lower, world_size=1)
    assert processes.run(limit, world_size=1) == [before]


@pytest.fixture
def ctrl_c():
    """Make Ctrl-C raise, even if a shell disabled it for background processes."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_in_the_controller_ends_the_ranks(processes, ctrl_c):
    pids = processes.pids(2)
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        processes.run(lambda: time.sleep(60), world_size=2)
    timer.join()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert_heals(processes)


def test_ctrl_c_does_not_wait_for_the_imports_of_the_fork_server(tmp_path):
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(30)\n")
    code = """
        import os, signal, threading, time
        import torch.distributed
        from pdlcheck.worlds.processes import ProcessWorld
        from pdlcheck.worlds.processes.controller import forkserver
        signal.signal(signal.SIGINT, signal.default_int_handler)
        forkserver.start(preload=["slow_to_import"])
        world = ProcessWorld()
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            world.run(print, world_size=2)
        except KeyboardInterrupt:
            print(*forkserver.retain(world).pids)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])},
        capture_output=True,
        text=True,
        timeout=25,
    )
    assert done.stderr == ""
    assert not any(is_running(int(pid)) for pid in done.stdout.split())


def test_a_fork_server_in_the_middle_of_an_import_ends_with_its_controller(tmp_path):
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(30)\n")
    code = """
        import os, signal, time
        from pdlcheck.worlds.processes.controller import forkserver
        forkserver.start(preload=["slow_to_import"])
        print(*forkserver.retain(forkserver).pids, flush=True)
        time.sleep(3)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, stdout=subprocess.PIPE, text=True, timeout=25
    )
    assert still_running(map(int, done.stdout.split())) == []


def test_processes_that_a_rank_has_started_end_with_it(processes):
    def start() -> int:
        import subprocess

        return subprocess.Popen(["sleep", "60"]).pid

    (pid,) = processes.run(start, world_size=1)
    assert os.path.exists(f"/proc/{pid}")
    with pytest.raises(RankDied):
        processes.run(lambda: os._exit(1), world_size=1)
    assert still_running([pid]) == []


@pytest.mark.parametrize("watch", [True, False], ids=["watched", "plain"])
@pytest.mark.parametrize(
    ("signo", "words"),
    [
        (signal.SIGKILL, "was killed by SIGKILL"),
        (signal.SIGTERM, "was killed by SIGTERM"),
        (signal.SIGSTOP, "was stopped by SIGSTOP or SIGTSTP"),
    ],
    ids=["SIGKILL", "SIGTERM", "SIGSTOP"],
)
def test_a_rank_that_is_lost_while_idle_is_replaced_before_the_next_call(watch, signo, words, capsys):
    world = ProcessWorld(watch=watch)
    try:
        before = world.pids(2)
        os.kill(before[1], signo)
        while signo == signal.SIGSTOP and state_of(before[1]) != "T":
            time.sleep(0.001)  # its threads may still answer until then
        after = world.run(os.getpid, world_size=2)  # at once, before a report of the death can arrive
        assert not set(before) & set(after)
        said = capsys.readouterr().err
        assert said == f"pdlcheck: rank 1 {words} while nothing ran on it; 2 new processes take over\n"
    finally:
        world.close()


def late_for_a_barrier() -> None:
    """Let a barrier time out on rank 0, which closes its connection for every later operation too."""
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="failed to pass monitoredBarrier"):
            dist.monitored_barrier(timeout=timedelta(seconds=0.5))


def refused_under_way() -> None:
    work = dist.all_reduce(torch.ones(1, dtype=torch.int16), async_op=True)
    with pytest.raises(RuntimeError, match="Invalid scalar type"):
        work.wait()


def refused_at_once() -> None:
    with pytest.raises(TypeError):
        dist.all_reduce(1.0)


@pytest.mark.parametrize(
    ("handled", "replaced"),
    [(late_for_a_barrier, True), (refused_under_way, True), (refused_at_once, False), (dist.barrier, False)],
)
def test_a_group_whose_operation_failed_is_not_used_again_though_the_function_handled_it(handled, replaced):
    world = ProcessWorld(timeout_s=20)
    try:
        before = world.pids(2)
        world.run(handled, world_size=2)
        assert_heals(world)
        assert (not set(before) & set(world.pids(2))) is replaced
    finally:
        world.close()


@pytest.mark.slow
def test_a_killed_fork_server_takes_the_ranks_along_and_is_replaced():
    world = ProcessWorld()
    try:
        world.run(dist.get_rank, world_size=2)
        os.kill(forkserver.retain(world).pid, signal.SIGKILL)
        told = r"rank \d went down with the process that had forked it, which was killed by SIGKILL$"
        with pytest.raises(RankDied, match=f"(?m){told}"):
            world.run(lambda: time.sleep(10), world_size=2)
        assert_heals(world)
    finally:
        world.close()


def test_a_fork_server_is_gone_once_a_rank_says_so_though_its_socket_is_open_yet():
    """A killed process closes its files one after the other: a rank's pipe may close before the socket."""
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    with ours, theirs:
        forker = forkserver.Forker(ours, pid=1)
        child = forkserver.Child(reading, forker, pid=1)
        assert not child.ended(0)
        assert not forker.hung_up
        os.close(writing)
        assert child.ended(0)
        assert child.went_with
        assert forker.hung_up
    os.close(reading)
