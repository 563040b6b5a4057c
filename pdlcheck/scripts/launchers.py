"""Programs that start their ranks themselves: ``torch.multiprocessing.spawn``, a ``Process`` for each rank, torchrun.

Such a program runs in this process, and what it starts becomes the ranks of a world.
"""

from __future__ import annotations

import ast
import multiprocessing.process
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed.launcher.api
import torch.multiprocessing.spawn

from pdlcheck.compat.patches import Patch, Patches
from pdlcheck.compat.python.multiprocessing import adopt, call_of, start_method_of
from pdlcheck.scripts.program import Program
from pdlcheck.worlds.program import program_modules

__all__ = ["NotALauncher", "RanksFailed", "Starting", "has_launcher", "start_ranks"]

_STARTS = {"spawn", "start_processes", "Process", "elastic_launch", "notebook_launcher"}
_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "torch.distributed.launcher")
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]  # a function with its arguments


class NotALauncher(BaseException):
    """A program that takes itself for a rank, before it has started any."""


class RanksFailed(BaseException):
    """The end of a program whose ranks have failed."""


@dataclass
class Starting:
    """What each of the ranks does that a program starts.

    Args:
        calls: a function with its arguments for each rank.
        anew: whether a rank imports the program anew, as a spawned process does; otherwise it goes on with what the
            program has imported and set so far, as a forked process does.
        program: another program, which every rank runs in place of a call.
        world_size: the number of ranks.
    """

    world_size: int
    calls: Sequence[Call] = ()
    anew: bool = False
    program: Program | None = None


def has_launcher(program: Program) -> bool:
    """Return whether the text of the script has a call that starts processes."""
    if program.is_module:
        return False
    try:
        with open(program.path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return False  # a folder, an archive, or a script that fails when it runs
    return any(_starts(node) for node in ast.walk(tree))


def _starts(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(attr=name)) | ast.Call(func=ast.Name(id=name)):
            return name in _STARTS
        case ast.ImportFrom(module=str(name)):
            return name.startswith(_LAUNCHERS)
        case ast.Import(names=names):
            return any(one.name.startswith(_LAUNCHERS) for one in names)
    return False


def start_ranks(program: Program, start: Callable[[Starting], None], devices: int = 0) -> None:
    """Run the program in this process, and call ``start`` with the ranks that it starts.

    Args:
        program: the program.
        start: runs the ranks.
        devices: the number of CUDA devices that the program finds; 0 for those that are there.

    Raises:
        NotALauncher: it takes itself for a rank.
    """
    started = False

    def begin(starting: Starting) -> None:
        nonlocal started
        started = True
        table.__exit__(None, None, None)  # ranks are no launchers
        try:
            start(starting)
        finally:
            table.__enter__()

    processes = _Processes(begin)
    rows = [
        Patch(
            sys.modules["torch.multiprocessing.spawn"],
            "start_processes",
            lambda _: _spawn(begin),
            "spawn starts ranks",
            True,
        ),
        Patch(torch.distributed.launcher.api, "launch_agent", lambda _: _launch(begin), "torchrun starts ranks"),
        Patch(multiprocessing.process.BaseProcess, "start", processes.starter, "a process becomes a rank"),
        Patch(torch.distributed, "init_process_group", _refuse, "the program is not a rank itself", True),
    ]
    if devices:
        rows.append(Patch(torch.cuda, "device_count", lambda _: lambda: devices, "ranks have CUDA as CPU", True))
        rows.append(Patch(torch.cuda, "is_available", lambda _: lambda: True, "ranks have CUDA as CPU", True))
    table = Patches(rows)
    before = list(sys.argv), list(sys.path), dict(os.environ), sys.modules["__main__"]
    try:
        with table:
            program.prepare()
            program.run()
            processes.run()
    except KeyError as error:
        if not started and error.args and error.args[0] in _VARIABLES:
            raise NotALauncher from None
        raise
    except SystemExit as exit_:
        if exit_.code:
            raise
        processes.run()
    finally:
        sys.argv[:], sys.path[:], environment, sys.modules["__main__"] = before
        os.environ.clear()
        os.environ.update(environment)


def _refuse(real: Callable[..., Any]) -> Callable[..., Any]:
    def init_process_group(*_: Any, **__: Any) -> None:
        raise NotALauncher

    return init_process_group


def _spawn(begin: Callable[[Starting], None]) -> Callable[..., Any]:
    """Return what takes the place of ``torch.multiprocessing.start_processes``."""

    def start_processes(
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
    ) -> Any:
        calls: list[Call] = [(fn, (rank, *args), {}) for rank in range(nprocs)]
        context = _Context(lambda: begin(Starting(nprocs, calls, anew=start_method != "fork")))
        if not join:
            return context
        context.join()
        return None

    return start_processes


class _Context:
    """What ``torch.multiprocessing.spawn(..., join=False)`` returns."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run
        self.processes: list[Any] = []

    def pids(self) -> list[int]:
        return []

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        run, self._run = self._run, None
        if run is not None:
            run()
        return True


def _launch(begin: Callable[[Starting], None]) -> Callable[..., Any]:
    """Return what takes the place of the agent of torchrun."""

    def launch_agent(
        config: Any, entrypoint: Callable[..., Any] | str | None, args: list[Any], **_: Any
    ) -> dict[int, Any]:
        world_size = config.nproc_per_node * config.max_nodes
        if isinstance(entrypoint, str):
            begin(Starting(world_size, program=_program_of([entrypoint, *map(str, args)])))
        elif entrypoint is not None:
            begin(
                Starting(world_size, [(entrypoint, tuple(args), {})] * world_size, anew=config.start_method != "fork")
            )
        return {}

    return launch_agent


def _program_of(words: Sequence[str]) -> Program:
    """Return the program of a command line of torchrun: ``python -u [-m] target arguments``."""
    rest = list(words[1:]) if os.path.basename(words[0]).startswith("python") else list(words)
    is_module = False
    while rest and rest[0] in ("-u", "-m"):
        is_module = rest.pop(0) == "-m" or is_module
    return Program(rest[0], tuple(rest[1:]), is_module, "" if is_module else os.path.abspath(rest[0]))


@dataclass
class _Processes:
    """The processes that a program has started to be ranks, and that it has not waited for yet."""

    begin: Callable[[Starting], None]
    started: list[Any] = field(default_factory=list)
    adopted: list[_Adopted] = field(default_factory=list)

    def starter(self, real: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return what takes the place of ``Process.start``."""

        def start(process: Any) -> None:
            if getattr(call_of(process)[0], "__module__", None) not in program_modules():
                real(process)  # a worker of a DataLoader, a manager
                return
            self.adopted.append(_Adopted(self))
            self.started.append(process)
            adopt(process, self.adopted[-1])

        return start

    def run(self) -> None:
        """Run the started processes as ranks, in the order in which they were started."""
        if not self.started:
            return
        processes, self.started = self.started, []
        adopted, self.adopted = self.adopted, []
        calls = [call_of(process) for process in processes]
        self.begin(Starting(len(calls), calls, anew=start_method_of(processes[0]) != "fork"))
        for one in adopted:
            one.returncode = 0


class _Adopted:
    """The ``_popen`` of a process that has become a rank."""

    def __init__(self, processes: _Processes) -> None:
        self._processes = processes
        self.returncode: int | None = None
        self.pid = os.getpid()
        self.sentinel = -1

    def poll(self, flag: int = 0) -> int | None:
        if self.returncode is None:
            self._processes.run()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        return self.poll()

    def terminate(self) -> None:
        pass

    kill = close = terminate
