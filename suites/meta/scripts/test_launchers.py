"""``pdlcheck run`` with scripts that start their ranks themselves."""

from __future__ import annotations

import pytest

SPAWN = """
    import os, sys
    import torch, torch.distributed as dist, torch.multiprocessing as mp

    STARTED_AS = __name__

    def worker(rank, size, words):
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12345"
        dist.init_process_group("gloo", rank=rank, world_size=size)
        x = torch.ones(1) + rank
        dist.all_reduce(x)
        print(STARTED_AS, words, x.item())

    if __name__ == "__main__":
        mp.spawn(worker, args=(3, "hello"), nprocs=3, {})
        print("main is done")
"""


@pytest.mark.parametrize("join", ["join=True", "join=False"])
def test_spawned_functions_are_the_ranks(scripts, join):
    text = SPAWN.replace("{}", join)
    scripts.write(
        "spawns.py",
        text if "True" in join else text.replace("mp.spawn(", "context = mp.spawn(") + "        context.join()\n",
    )
    code, out, err = scripts.run("spawns.py")
    assert code == 0, err
    assert sorted(out.splitlines()) == [*(f"[rank {rank}] __mp_main__ hello 6.0" for rank in range(3)), "main is done"]
    assert err.startswith("no fault seen on sim: 3 ranks")


PROCESSES = """
    import torch, torch.distributed as dist
    from torch.multiprocessing import Process

    def work(rank, size):
        dist.init_process_group("gloo", rank=rank, world_size=size)
        own = torch.zeros(1)
        if rank:
            dist.recv(own, 0)
        else:
            dist.send(own + offset, 1)
        print("has", own.item())

    if __name__ == "__main__":
        offset = 5.0
        started = [Process(target=work, args=(rank, 2)) for rank in range(2)]
        for process in started:
            process.start()
        for process in started:
            process.join()
        print("codes", [process.exitcode for process in started])
"""


def test_processes_are_the_ranks_and_see_what_the_script_has_set(scripts):
    scripts.write("forks.py", PROCESSES)
    code, out, err = scripts.run("forks.py")
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[rank 0] has 0.0", "[rank 1] has 5.0", "codes [0, 0]"]


def test_a_hang_of_spawned_ranks_is_a_verdict(scripts):
    scripts.write("forks.py", PROCESSES.replace("dist.send(own + offset, 1)", "pass"))
    code, out, err = scripts.run("forks.py")
    assert code == 1
    assert "rank 1: blocked in recv" in err
    assert "codes" not in out


def test_torchrun_within_a_script_starts_the_ranks(scripts):
    scripts.write(
        "train.py", "import torch.distributed as d, sys; d.init_process_group('gloo'); d.barrier(); print(sys.argv[1:])"
    )
    scripts.write(
        "launch.py",
        """
        from torch.distributed.run import main
        main(["--nproc-per-node", "2", "train.py", "--lr", "0.1"])
        """,
    )
    code, out, err = scripts.run("launch.py")
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[rank {rank}] ['--lr', '0.1']" for rank in range(2)]


def test_a_script_for_torchrun_may_name_spawn(scripts):
    scripts.write(
        "both.py",
        """
        import os, torch.distributed as dist, torch.multiprocessing as mp

        def worker(rank):
            dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
            dist.barrier()
            print("rank", rank)

        if int(os.environ["RANK"]) >= 0:
            worker(int(os.environ["RANK"]))
        else:
            mp.spawn(worker, nprocs=2)
        """,
    )
    code, out, err = scripts.run("-n", 2, "both.py")
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[rank 0] rank 0", "[rank 1] rank 1"]


def test_the_script_decides_how_many_ranks_it_starts(scripts):
    scripts.write("spawns.py", SPAWN.replace("{}", "join=True"))
    code, _, err = scripts.run("-n", 2, "spawns.py")
    assert code == 0
    assert "the program started 3 ranks itself: -n 2 is not used" in err


def test_a_script_that_starts_no_ranks_says_so(scripts):
    scripts.write("spawns.py", SPAWN.replace(", {}", "").replace('if __name__ == "__main__"', "if len(sys.argv) > 1"))
    code, _, err = scripts.run("spawns.py")
    assert code == 1
    assert err.startswith("nothing was checked: the program started no ranks")


def test_one_rank_for_each_device_needs_devices(scripts):
    scripts.write("spawns.py", SPAWN.replace("nprocs=3, {}", "nprocs=torch.cuda.device_count()"))
    code, _, err = scripts.run("spawns.py")
    assert code == 2
    assert "spawns.py starts 0 ranks; if it starts one for each CUDA device, use --cuda-as-cpu and -n" in err
    assert scripts.run("-n", 3, "--cuda-as-cpu", "spawns.py")[0] == 0


def test_a_script_that_chooses_its_ranks_is_not_compared_on_other_numbers(scripts):
    scripts.write("spawns.py", SPAWN.replace("{}", "join=True"))
    code, _, err = scripts.run("--compare-world-sizes", "1,2", "spawns.py")
    assert code == 2
    assert "spawns.py starts its ranks itself" in err


def test_an_error_before_the_ranks_start_is_a_verdict(scripts):
    scripts.write("spawns.py", SPAWN.replace(", {}", "").replace("mp.spawn(", "raise ValueError('no data'); mp.spawn("))
    code, _, err = scripts.run("spawns.py")
    assert code == 1
    assert "spawns.py" in err
    assert err.endswith("ValueError: no data\n")


def test_an_exit_before_the_ranks_start_is_a_verdict(scripts):
    scripts.write("spawns.py", SPAWN.replace(", {}", "").replace("mp.spawn(", "sys.exit(3); mp.spawn("))
    code, _, err = scripts.run("spawns.py")
    assert code == 1
    assert err == "ProgramExit: the program ended with exit code 3 before it had started all ranks\n"
