"""The options and ini values of the plugin. Does not import torch.

Each option has one name that no other plugin uses, ``--pdl-NAME``. ``short_names`` also accepts ``--NAME``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

from pdlcheck.worlds.choices import DEVICES, ISOLATIONS, SEMANTICS

__all__ = ["LAUNCH_MODES", "OWN_MARKERS", "PREFIX", "SHORT_NAMES", "add_options", "has_short_names"]

PREFIX = "--pdl-"
OWN_MARKERS = "pdlcheck_markers"  # name of the ini value
LAUNCH_MODES = ("auto", "join", "ignore")

_OPTIONS: dict[str, dict[str, Any]] = {
    "world": {
        "metavar": "NAME[,NAME]",
        "help": "where ranks run: sim (simulated, in this process), gloo (processes), mpi (processes in a run of "
        "mpiexec) or nccl (processes with a CUDA device each); default: sim; gloo under torchrun, mpiexec or srun",
    },
    "rank-device": {
        "choices": DEVICES,
        "help": "the fixture `device` of the ranks: cpu, or cuda, whose devices the ranks of gloo share, and those of "
        "sim the first; default: cuda on nccl, cpu elsewhere",
    },
    "cuda-as-cpu": {
        "action": "store_true",
        "help": "run the CUDA code of the ranks of sim, gloo and mpi on the CPU: torch.cuda, .cuda(), device "
        "arguments, backend nccl; docs/cuda-as-cpu.md says what that covers; also the ini value pdlcheck_cuda_as_cpu",
    },
    "init-method": {
        "metavar": "URL",
        "help": "where the processes of torchrun, mpiexec or srun meet: env://, tcp://HOST:PORT or file:///PATH; "
        "default: env:// if MASTER_ADDR and MASTER_PORT are set",
    },
    "launch": {
        "choices": LAUNCH_MODES,
        "help": "under torchrun, mpiexec or srun: auto (run one session over all launched processes if a collected "
        "test needs ranks; otherwise every process runs pytest by itself), join (always run one session) or ignore "
        "(never); default: the ini value pdlcheck_launch, or auto",
    },
    "isolation": {
        "choices": ISOLATIONS,
        "default": "pool",
        "help": "what tests on processes share: pool (the processes and their default group), reinit (the processes; "
        "each test has a new default group), fresh (nothing); default: %(default)s; a marker `isolation` comes first",
    },
    "seed": {
        "type": int,
        "metavar": "N",
        "default": 0,
        "help": "seed of the ranks' random streams, and of the simulated schedule; default: %(default)s",
    },
    "schedule": {
        "metavar": "SCHEDULE",
        "help": "which simulated rank goes on: first, random:SEED, pct:SEED[,DEPTH[,STEPS]] or replay:CODE, as a "
        "failure prints it; default: random, from --pdl-seed; where it is given the marker schedules has no effect",
    },
    "semantics": {
        "choices": SEMANTICS,
        "default": "rendezvous",
        "help": "what the simulated network does where the rules leave a choice; default: %(default)s; a marker "
        "`semantics` comes first",
    },
    "timeline": {
        "metavar": "DIR",
        "help": "on sim, draw what the ranks of each test did: DIR/TEST.svg, and DIR/TEST.json for ui.perfetto.dev; "
        "of a test that calls world.run several times, the last call",
    },
    "json": {
        "metavar": "FILE",
        "help": "write one line of JSON for each result: the test, its world and outcome, and the fields of a failed "
        "check, such as rank, tensor, index, found, expected and cause",
    },
    "github": {
        "action": "store_true",
        "help": "print a workflow command of GitHub Actions for each failed test, so that GitHub shows its message at "
        "its line of the change",
    },
    "subject": {
        "action": "append",
        "metavar": "NAME=MODULE:FUNCTION",
        "default": [],
        "help": "run the suites of primitive NAME on your own function instead; may be repeated",
    },
    "rank-pdb": {
        "type": int,
        "metavar": "RANK",
        "help": "give the terminal to the debugger of this rank, at breakpoint() and at its failure; the others wait",
    },
    "plain": {
        "action": "store_true",
        "default": bool(os.environ.get("PDLCHECK_PLAIN")),
        "help": "take no fast paths, where pdlcheck does pytest's own work in less time: to find out whether one of "
        "them disagrees with a plugin or a new pytest; also the environment variable PDLCHECK_PLAIN=1",
    },
    "require-gpu": {
        "action": "store_true",
        "help": "a test that needs CUDA fails where there is none, instead of being skipped",
    },
    "no-skip-worlds": {
        "action": "store_true",
        "help": "a test fails where its world cannot run on this machine, or has too few ranks, instead of being "
        "skipped",
    },
}
_WITHOUT_SHORT_NAME = {"json", "launch", "plain", "seed"}
SHORT_NAMES = {f"--{name}": f"{PREFIX}{name}" for name in _OPTIONS if name not in _WITHOUT_SHORT_NAME}


def add_options(parser: pytest.Parser) -> None:
    """Declare the options of the command line and the ini values."""
    group = parser.getgroup("pdlcheck", "parallel code on several ranks (--pdl-NAME, or --NAME unless others use it)")
    for name, settings in _OPTIONS.items():
        group.addoption(f"{PREFIX}{name}", **settings)
    parser.addini(
        "pdlcheck_own_globals",
        "modules, or packages, whose globals each simulated rank has for itself, as a process would",
        type="args",
        default=[],
    )
    parser.addini(
        "pdlcheck_cuda_as_cpu",
        "run the CUDA code of the ranks on the CPU, as --cuda-as-cpu does",
        type="bool",
        default=False,
    )
    parser.addini(
        "pdlcheck_comm_wrappers",
        "modules, or packages, through which the program communicates: reports show the lines that call them",
        type="args",
        default=[],
    )
    parser.addini(
        OWN_MARKERS,
        "markers that are pdlcheck's in this project wherever they stand, such as: gpu world_size",
        type="args",
        default=[],
    )
    parser.addini(
        "pdlcheck_not_seen",
        "conditions that passed checks have not met: report them, or fail the session",
        default="report",
    )
    parser.addini(
        "pdlcheck_accept_unseen",
        "conditions that cannot occur in this project, such as: check_metric: a rank without samples",
        type="linelist",
        default=[],
    )
    parser.addini("pdlcheck_launch", f"default of {PREFIX}launch: {', '.join(LAUNCH_MODES)}", default="auto")


def has_short_names(args: Iterable[str]) -> bool:
    """Return whether one of these arguments is a short name of ours, or begins with one and ``=``."""
    return any(argument.partition("=")[0] in SHORT_NAMES for argument in args)
