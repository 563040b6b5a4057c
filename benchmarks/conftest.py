"""Options and fixtures of the benchmarks; every result carries the machine that it was made on."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pdlcheck.worlds import Ranks, get_world

collect_ignore = ["harness_peers.py", "peers", "predicted_pipeline.py"]  # programs of their own


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="larger inputs, more ranks and more rounds: takes long")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("python_files", "bench_*.py")


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info.pop("node", None)  # results are published: what the machine is matters, not its name


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say in words what was compared inside one benchmark, which the table of times does not show."""
    session = getattr(config, "_benchmarksession", None)
    rows = [line for bench in session.benchmarks if (line := _in_words(bench.extra_info))] if session else []
    if rows:
        terminalreporter.section("interleaved in one run, slowest rank")
        for line in rows:
            terminalreporter.line(line)


def _in_words(info: dict[str, Any]) -> str:
    if "ring_over_gloo" in info:
        ours, theirs = info["ring_seconds"] * 1e3, info["gloo_seconds"] * 1e3
        return (
            f"all_reduce {info['nbytes']:>9} B, {info['world_size']} ranks: ring_all_reduce {ours:7.2f} ms, "
            f"gloo {theirs:7.2f} ms, ratio {ours / theirs:.2f}, ring busbw {info['ring_busbw_GBps']:.3f} GB/s"
        )
    if "loop_s" in info:
        times = ", ".join(f"{name} {info[f'{name}_s'] * 1e3:.1f}" for name in ("none", "loop", "flat", "ddp"))
        return (
            f"gradient sync of {info['tensors']:>3} tensors, {info['world_size']} ranks, ms a step: {times}; "
            f"loop / flat {info['loop_s'] / info['flat_s']:.1f}, flat / ddp {info['flat_s'] / info['ddp_s']:.2f}"
        )
    if "pipeline_ours_s" in info:
        ours, theirs = info["pipeline_ours_s"] * 1e3, info["pipeline_torch_s"] * 1e3
        return (
            f"{info['schedule']:>5}, {info['n_microbatches']} micro-batches, {info['world_size']} stages, ms a step: "
            f"Pipeline {ours:.1f}, torch {theirs:.1f}, ratio {ours / theirs:.2f}"
        )
    if "bubble_model_s" in info:
        measured, model = info["bubble_measured_s"] * 1e3, info["bubble_model_s"] * 1e3
        return (
            f"{info['schedule']:>5}, {info['n_microbatches']} micro-batches, {info['world_size']} sleeping stages: "
            f"{measured:.1f} ms a step, (m + p - 1)(3 T + c) {model:.1f} with c = {info['overhead_s'] * 1e3:.2f} ms, "
            f"ratio {measured / model:.3f}"
        )
    if "synchronous_over_floor" in info:
        times = ", ".join(f"{name} {info[f'{name}_epoch_s'] * 1e3:.0f}" for name in ("floor", "synchronous", "local"))
        return (
            f"epoch of the function network, 1 rank, ms: {times}; synchronous / floor "
            f"{info['synchronous_over_floor']:.3f}, local / floor {info['local_over_floor']:.3f}"
        )
    if "flat_every_s" in info:
        rows = [
            f"{name} {' / '.join(f'{s * 1e3:.0f}' for s in info[f'{name}_every_s'])} "
            f"= {info[f'{name}_fit_s'][0] * 1e3:.0f} + {info[f'{name}_fit_s'][1] * 1e3:.0f} / k "
            f"within {info[f'{name}_worst_of_fit']:.0%}"
            for name in ("naive", "flat")
        ]
        return f"gradients every 1 / 2 / 4 / 10 / never, {info['world_size']} ranks, ms an epoch: {'; '.join(rows)}"
    if "over_torch" in info:
        times = ", ".join(f"{name} {info[f'{name}_s'] * 1e3:.1f}" for name in ("none", "torch", "ours"))
        return (
            f"distributed data parallel, {info['model']}, {info['world_size']} ranks, ms a step: {times}; "
            f"ours / torch's {info['over_torch']:.3f}"
        )
    if "gloo_over_mpi" in info:
        return (
            f"distributed data parallel, small MLP, 2 ranks, ms a step: gloo {info['gloo_s'] * 1e3:.2f}, "
            f"mpi {info['mpi_s'] * 1e3:.2f}, ratio {info['gloo_over_mpi']:.1f}"
        )
    return ""


def pytest_benchmark_update_commit_info(config: pytest.Config, commit_info: dict[str, Any]) -> None:
    commit_info["project"] = "pdlcheck"  # else the name of the folder that it was cloned into


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """True where ``--full`` asks for everything."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="module", params=[2, 4], ids="{}ranks".format)
def ranks(request: pytest.FixtureRequest, full: bool) -> Iterator[Ranks]:
    """Processes with one thread each on gloo, started once and kept for all rounds; nothing watches them."""
    if request.param > 2 and not full:
        pytest.skip("more ranks than two; --full runs it")
    world = get_world("gloo", watch=False, threads_per_rank=1, timeout_s=600)
    with world.open(request.param) as started:
        yield started
    world.close()


@pytest.fixture(autouse=True)
def machine(request: pytest.FixtureRequest) -> Iterator[None]:
    """Record hardware, versions and how busy the machine was, before and after."""
    if "benchmark" not in request.fixturenames:
        yield
        return
    extra_info: dict[str, Any] = request.getfixturevalue("benchmark").extra_info
    extra_info["load_before"] = os.getloadavg()[0]
    yield
    extra_info |= {
        "load_after": os.getloadavg()[0],
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
