"""The process world: the state of its ranks, and a check that it leaves nothing behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import rpc

from pdlcheck.cores import usable_cores
from pdlcheck.errors import WorldUnavailable
from pdlcheck.worlds.processes import ProcessWorld
from pdlcheck.worlds.processes.controller import forkserver

from ..clone import ROOT
from ..still_running import is_running, still_running


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessWorld]:
    forkserver.start(preload=["pytest"])  # the ranks import this module
    world = ProcessWorld(timeout_s=20)
    yield world
    world.close()


def double(x):
    return 2 * x


def test_results_come_in_rank_order(processes):
    assert processes.run(lambda: dist.get_rank(), world_size=3) == [0, 1, 2]


def test_a_module_function_a_lambda_and_a_closure_run_with_their_arguments(processes):
    offset = torch.tensor([10.0])
    assert processes.run(double, 21, world_size=2) == [42, 42]
    assert processes.run(lambda *, x: x + offset, x=torch.ones(1), world_size=2) == [11, 11]


def test_arguments_are_copies_for_each_rank(processes):
    numbers = [1]
    assert processes.run(lambda xs: xs.append(dist.get_rank()) or xs, numbers, world_size=2) == [
        [1, 0],
        [1, 1],
    ]
    assert numbers == [1]


def test_processes_are_kept_between_calls(processes):
    assert processes.run(os.getpid, world_size=2) == processes.pids(2) == processes.run(os.getpid, world_size=2)


def test_the_default_group_is_gloo_on_loopback_and_new_groups_work(processes):
    def body():
        group = dist.new_group([0, 2])
        x = torch.tensor([float(dist.get_rank())])
        if dist.get_rank() in (0, 2):
            dist.all_reduce(x, group=group)
        return dist.get_backend(), x.item()

    assert processes.run(body, world_size=3) == [("gloo", 2.0), ("gloo", 1.0), ("gloo", 2.0)]
    addresses = [address for pid in processes.pids(3) for address in listening_addresses(pid)]
    assert addresses
    assert set(addresses) == {"0100007F"}  # 127.0.0.1


def listening_addresses(pid: int) -> list[str]:
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        target = os.readlink(f"/proc/{pid}/fd/{fd}")
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    rows = [line.split() for file in ("tcp", "tcp6") for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]]
    return [row[1].split(":")[0] for row in rows if row[9] in inodes and row[3] == "0A"]


@pytest.mark.parametrize("watch", [True, False])
def test_ddp_keeps_replicas_equal(watch):
    def body():
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3), bucket_cap_mb=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(dist.get_rank())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().sum().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    world = ProcessWorld(watch=watch)
    try:
        one, other = world.run(body, world_size=2)
    finally:
        world.close()
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def notes_of_seeding():
    """Return the number of unused devices that seeding recorded, and the numbers drawn after it."""
    traces = []
    honest, traceback.format_stack = traceback.format_stack, lambda *_: traces.append(1)
    try:
        torch.manual_seed(5)
        torch.cuda.manual_seed_all(5)
    finally:
        traceback.format_stack = honest
    return len(traces), torch.rand(2).tolist()


@pytest.mark.skipif(torch.cuda._is_compiled(), reason="this torch may have to seed CUDA")
def test_seeding_notes_no_stack_traces_for_devices_that_torch_was_built_without(processes):
    noted, drawn = notes_of_seeding()
    assert noted, "torch no longer notes them: pdlcheck need not see to it"
    assert processes.run(notes_of_seeding, world_size=2) == [(0, drawn)] * 2


def test_ranks_have_different_random_streams_and_the_same_ones_in_each_call(processes):
    def draw():
        return torch.rand(1).item(), random.random(), np.random.rand()

    first, second = processes.run(draw, world_size=2)
    assert all(a != b for a, b in zip(first, second, strict=True))
    assert processes.run(draw, world_size=2) == [first, second]


def test_what_the_fork_server_imported_is_no_garbage_to_look_for_in_a_rank(processes):
    def collector():
        return gc.isenabled(), gc.get_freeze_count() > 100_000

    assert processes.run(collector, world_size=2) == [(True, True)] * 2


def test_cores_are_shared_out_and_threads_can_be_given(processes):
    cores = usable_cores()
    assert processes.run(torch.get_num_threads, world_size=2) == [max(1, cores // 2)] * 2
    world = ProcessWorld(threads_per_rank=3)
    try:
        assert world.run(torch.get_num_threads, world_size=1) == [3]
    finally:
        world.close()


def test_ranks_see_the_launcher_variables_and_the_surroundings_of_the_controller(processes, tmp_path, monkeypatch):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "FRUIT")
    look = lambda: ([os.environ.get(name) for name in names], os.getcwd(), sys.argv)  # noqa: E731
    monkeypatch.setenv("FRUIT", "pear")
    monkeypatch.setenv("RANK", "7")
    monkeypatch.chdir(tmp_path)
    arguments = [*sys.argv]
    found = processes.run(look, world_size=2)
    assert found == [([str(r), str(r), "2", "2", "pear"], str(tmp_path), arguments) for r in range(2)]
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "3"])
    assert [own[2] for own in processes.run(look, world_size=2)] == [["train.py", "--epochs", "3"]] * 2
    monkeypatch.setenv("FRUIT", "plum")
    assert processes.run(look, world_size=2)[0][0][-1] == "plum"
    monkeypatch.delenv("FRUIT")
    assert processes.run(look, world_size=2)[0][0][-1] is None


@pytest.mark.slow
def test_files_of_the_working_directory_stand_in_for_no_module_of_the_standard_library(tmp_path):
    """The command pytest does not put that folder on the path, so no test sees the files; nor does the fork server."""
    for name in ("enum", "json", "operator", "types"):
        (tmp_path / f"{name}.py").write_text("VERSION = 1\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(
        "import json, pytest\n@pytest.mark.world_size(2)\ndef test_a(rank): assert json.loads(str(rank)) == rank\n"
    )
    command = [Path(sys.executable).with_name("pytest"), "-q", "-p", "no:cacheprovider", "--pdl-world=gloo"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.filterwarnings("ignore:You are using a Backend")
def test_rpc_runs_and_again_on_the_same_ranks(processes):
    """RPC makes its own gloo group, which torch must still recognise as one."""

    def asks():
        rpc.init_rpc(f"worker{dist.get_rank()}", rank=dist.get_rank(), world_size=dist.get_world_size())
        found = rpc.rpc_sync(f"worker{dist.get_world_size() - 1}", torch.add, args=(torch.ones(1), dist.get_rank()))
        rpc.shutdown()
        dist.barrier()
        return found.item()

    for world_size in (2, 2, 3):
        assert processes.run(asks, world_size=world_size) == [1.0 + rank for rank in range(world_size)]


def test_a_module_in_a_folder_added_later_is_found(processes, tmp_path, monkeypatch):
    processes.run(double, 1, world_size=2)
    (tmp_path / "added_later.py").write_text("def answer():\n    return 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    import added_later

    assert processes.run(added_later.answer, world_size=2) == [42, 42]


def test_a_call_does_not_inherit_the_settings_of_the_one_before(processes):
    def settings():
        return torch.ones(1).dtype, torch.get_num_threads()

    before = processes.run(settings, world_size=2)
    processes.run(lambda: torch.set_default_dtype(torch.float64) or torch.set_num_threads(91), world_size=2)
    assert processes.run(settings, world_size=2) == before


def test_open_ranks_keep_what_their_own_code_set_up(processes, monkeypatch):
    def set_up():
        os.environ["FRUIT"] = "plum"
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(7)

    def look():
        return os.environ["FRUIT"], os.environ["COLOUR"], torch.ones(1).dtype, torch.initial_seed()

    with processes.open(2) as ranks:
        ranks.run(set_up)
        monkeypatch.setenv("COLOUR", "blue")
        assert ranks.run(look) == [("plum", "blue", torch.float64, 7)] * 2
        assert (ranks.world_size, ranks.intact) == (2, True)
    assert not ranks.intact
    with pytest.raises(RuntimeError, match=r"`with world.open\(...\) as ranks:`, which has ended; open new ones"):
        ranks.run(look)


def test_processes_with_too_many_groups_are_replaced_between_runs(processes):
    before = processes.pids(2)
    processes.run(lambda: [dist.new_group([0, 1]) for _ in range(33)] and None, world_size=2)
    assert processes.run(dist.get_rank, world_size=2) == [0, 1]
    assert not set(before) & set(processes.pids(2))


def test_a_function_that_destroys_the_default_group_does_not_harm_the_next_call(processes):
    processes.run(lambda: dist.destroy_process_group(), world_size=2)
    assert processes.run(dist.get_rank, world_size=2) == [0, 1]


def test_a_function_may_end_the_default_group_and_make_it_again_by_the_environment(processes):
    def cycle():
        for _ in range(3):
            dist.destroy_process_group()
            dist.init_process_group("gloo")
            x = torch.ones(1)
            dist.all_reduce(x)
            assert x == 2
        return dist.get_rank()

    for _ in range(2):
        assert processes.run(cycle, world_size=2) == [0, 1]


def test_what_ranks_print_is_shown_with_the_rank(processes, capsys):
    processes.run(lambda: print("hello"), world_size=2)
    assert capsys.readouterr().out == "[rank 0] hello\n[rank 1] hello\n"


@pytest.mark.parametrize(
    ("world_size", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), ("2", TypeError)]
)
def test_a_wrong_world_size_is_refused_with_the_cure(processes, world_size, error):
    with pytest.raises(error, match=r"world_size must be .* pass the number of ranks"):
        processes.run(dist.get_rank, world_size=world_size)


def test_a_backend_that_torch_lacks_is_refused_with_the_cure():
    with pytest.raises(WorldUnavailable, match="no backend 'ucc'; use backend gloo"):
        ProcessWorld("ucc").run(dist.get_rank, world_size=2)


def test_a_module_that_cannot_be_preloaded_is_reported():
    text = run_script(
        """
        from pdlcheck.worlds.processes import ProcessWorld
        from pdlcheck.worlds.processes.controller import forkserver
        forkserver.start(preload=["no_such_module"])
        ProcessWorld().run(print, world_size=1)
        """
    ).stderr
    assert "the fork server could not import no_such_module (ModuleNotFoundError: No module named" in text


def run_script(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env=environment, capture_output=True, text=True, timeout=30,
    )  # fmt: skip


@pytest.mark.slow
def test_a_script_without_main_guard_works_and_close_leaves_no_child(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, torch, torch.distributed as dist
            from pdlcheck.worlds.processes import ProcessWorld
            class Box:
                def __init__(self, x): self.x = x
            def total(box):
                dist.all_reduce(box.x)
                return box
            fds = len(os.listdir("/proc/self/fd"))
            world = ProcessWorld()
            boxes = world.run(total, Box(torch.ones(1)), world_size=2)
            print([type(box) is Box and box.x.item() for box in boxes])
            world.close()
            print(open(f"/proc/self/task/{os.getpid()}/children").read().split())
            print(len(os.listdir("/proc/self/fd")) - fds)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.stdout, done.stderr) == ("[2.0, 2.0]\n[]\n0\n", "")
    torchs_own_cache = {name for name in os.listdir(tmp_path) if name.startswith("torchinductor_")}
    assert set(os.listdir(tmp_path)) - torchs_own_cache == {"script.py"}


def test_a_world_that_nobody_holds_gives_back_its_ranks():
    def dropped() -> tuple[list[int], int]:
        pids = ProcessWorld().pids(2)
        return pids, len(os.listdir("/proc/self/fd"))

    _, fds = dropped()
    pids, after = dropped()
    assert not any(map(is_running, pids))
    assert after == fds


def test_no_process_survives_a_killed_controller():
    code = """
        import sys, time
        from pdlcheck.worlds.processes import ProcessWorld
        from pdlcheck.worlds.processes.controller import forkserver
        world = ProcessWorld()
        print(*world.pids(2), *forkserver.retain(world).pids, flush=True)
        world.run(lambda: time.sleep(100), world_size=2)
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "random"}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, stdout=subprocess.PIPE, text=True
    ) as controller:
        assert controller.stdout is not None
        pids = [int(word) for word in controller.stdout.readline().split()]
        assert len(pids) == 4  # two ranks, and the two processes that have forked them
        assert all(is_running(pid) for pid in pids)
        time.sleep(0.2)
        controller.send_signal(signal.SIGKILL)
    assert still_running(pids) == []
