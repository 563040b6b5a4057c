"""A rank has its own signal handlers, even if the ranks are threads of one process."""

from __future__ import annotations

import pytest

# a trainer that saves and exits when the cluster takes its machine away, as many trainers do
PROGRAM = """
import os, signal, sys, threading
from signal import SIGTERM, signal as set_handler

class Preempted(Exception): pass

class Trainer:
    def __init__(self):
        self.told = []
        self.before = set_handler(SIGTERM, self.on_signal)

    def on_signal(self, number, frame):
        self.told.append((number, frame.f_code.co_name))

@pytest.fixture(autouse=True)
def handlers_stay():
    numbers = [s for s in signal.valid_signals() if s not in (signal.SIGKILL, signal.SIGSTOP)]
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        if handler is not None:
            signal.signal(number, handler)

def send(way):
    signal.raise_signal(SIGTERM) if way == "raise" else os.kill(os.getpid(), SIGTERM)

@W
@pytest.mark.parametrize("way", ["raise", "kill"])
def test_each_rank_has_its_own(rank, way):
    assert signal.getsignal(SIGTERM) is signal.SIG_DFL
    trainer = Trainer()
    assert trainer.before is signal.SIG_DFL
    dist.barrier()
    assert signal.getsignal(SIGTERM) == trainer.on_signal
    if rank == 0:
        send(way)
    stop = torch.tensor([float(len(trainer.told))])
    dist.all_reduce(stop)
    assert stop == 1
    assert trainer.told == ([(SIGTERM, "send")] if rank == 0 else [])

@W
def test_a_handler_may_raise(rank):
    def leave(number, frame): raise Preempted
    assert signal.signal(SIGTERM, leave) is signal.SIG_DFL
    with pytest.raises(Preempted):
        send("raise")
    assert signal.signal(SIGTERM, signal.SIG_IGN) is leave
    send("kill")
    assert signal.signal(SIGTERM, 0) is signal.SIG_IGN
    assert signal.getsignal(SIGTERM) is signal.SIG_DFL
    dist.barrier()

@W
def test_what_python_refuses():
    with pytest.raises(TypeError, match="must be signal.SIG_IGN, signal.SIG_DFL, or a callable"):
        signal.signal(SIGTERM, None)
    with pytest.raises(TypeError, match="must be signal.SIG_IGN, signal.SIG_DFL, or a callable"):
        signal.signal(SIGTERM, 7)
    with pytest.raises(ValueError, match="out of range"):
        signal.signal(1000, signal.SIG_IGN)
    with pytest.raises(OSError):
        signal.signal(signal.SIGKILL, signal.SIG_IGN)
    refused = []
    def elsewhere():
        try:
            signal.signal(SIGTERM, signal.SIG_IGN)
        except ValueError as error:
            refused.append(str(error))
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(refused) == 1 and "main thread" in refused[0]

@W
def test_a_process_of_its_own():
    if (child := os.fork()) == 0:
        signal.signal(SIGTERM, lambda *_: os._exit(7))
        os.kill(os.getpid(), SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    os.kill(os.getpid(), 0)
    signal.raise_signal(signal.SIGCHLD)
"""


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_handlers(run, world):
    run(PROGRAM, world=world).assert_outcomes(passed=5)


# a rank that a signal ends, and one that needs a timer of the process
ENDED = """
import os, signal

@W
def test_ended(rank):
    if rank == 1:
        os.kill(os.getpid(), {sent})
    dist.barrier()

@W
def test_stopped(rank):
    signal.raise_signal(signal.SIGSTOP)

@W
def test_timed(rank):
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(60)

@W
def test_after(): dist.barrier()
"""


@pytest.mark.parametrize(("sent", "name"), [("signal.SIGTERM", "SIGTERM"), ("9", "signal 9")])
def test_a_simulated_rank_does_not_end_the_session(run, sent, name):
    result = run(ENDED.format(sent=sent), world="sim")
    result.assert_outcomes(passed=1, failed=3)
    result.stdout.fnmatch_lines(
        [
            f"*RuntimeError: {name} would end or stop this process with all its ranks; simulated ranks are threads*",
            "*SIGSTOP would end or stop*--world gloo*",
            "*signal only works in main thread*",
        ]
    )
