"""``pdlcheck run`` with scripts that know nothing of pdlcheck, on simulated ranks."""

from __future__ import annotations

import json
import os
import re
import sys

import pytest

from pdlcheck.cli import main

from ..clone import ROOT

TRAIN = """
    import argparse, os
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    import helper

    RANK = int(os.environ["RANK"])

    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument("--steps", type=int, default=2)
        steps = parser.parse_args().steps
        dist.init_process_group("gloo")
        helper.rank = dist.get_rank()
        model = DistributedDataParallel(torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            loss = model(torch.full((2, 3), 1.0 + RANK)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert helper.rank == RANK == dist.get_rank()
        print("rank", helper.rank, "is", "done")
        dist.destroy_process_group()

    if __name__ == "__main__":
        main()
"""


def test_an_unchanged_script_runs_on_ranks(scripts):
    scripts.write("helper.py", "rank = None\n")
    train = scripts.write("train.py", TRAIN)
    code, out, err = scripts.run("-n", 3, train, "--steps", 3)
    assert sorted(out.splitlines()) == [f"[rank {rank}] rank {rank} is done" for rank in range(3)]
    assert code == 0, err
    assert err.startswith("no fault seen on sim: 3 ranks, 3 optimizer steps, ")


def test_a_module_runs_as_python_m_runs_it(scripts):
    scripts.write("package/helper.py", "rank = None\n")
    scripts.write("package/__init__.py", "")
    scripts.write("package/train.py", TRAIN.replace("import helper", "from package import helper"))
    code, out, err = scripts.run("-n", 2, "-m", "package.train", "--steps", 1)
    assert (code, len(out.splitlines())) == (0, 2), err


def test_a_script_sees_what_python_shows_it(scripts):
    script = scripts.write("sub/show.py", "import sys; print([__name__, __file__, sys.argv, sys.path[0]])\n")
    _, out, _ = scripts.run("-n", 1, "sub/show.py", "-n", "7", "--flag")
    folder = str(script.parent)
    assert out.strip() == f"[rank 0] {['__main__', str(script), ['sub/show.py', '-n', '7', '--flag'], folder]}"


def test_each_rank_has_a_folder_and_arguments_of_its_own(scripts):
    scripts.write(
        "own.py",
        """
        import os, sys
        import torch.distributed as dist
        dist.init_process_group("gloo")
        folder = f"of_{dist.get_rank()}"
        os.mkdir(folder)
        os.chdir(folder)
        sys.argv.append(folder)
        dist.barrier()
        print(os.path.basename(os.getcwd()), sys.argv[-1])
        """,
    )
    _, out, err = scripts.run("-n", 2, "own.py")
    assert sorted(out.splitlines()) == ["[rank 0] of_0 of_0", "[rank 1] of_1 of_1"], err


def test_an_import_after_a_turn_of_another_rank_finds_the_ranks_own_modules(scripts):
    scripts.write("helper.py", "rank = None\n")
    scripts.write(
        "late.py",
        """
        import sys
        import torch.distributed as dist
        import helper

        dist.init_process_group("gloo")
        helper.rank = mine = dist.get_rank()
        dist.barrier()
        import helper as again
        assert again is helper and again.rank == mine
        assert vars(sys.modules["__main__"])["mine"] == mine
        """,
    )
    code, _, err = scripts.run("-n", 3, "late.py")
    assert code == 0, err


def test_a_module_may_communicate_while_it_is_imported(scripts):
    scripts.write(
        "groups.py", "import torch.distributed as d; d.init_process_group('gloo'); d.barrier(); r = d.get_rank()"
    )
    scripts.write("early.py", "import groups; print(groups.r)\n")
    code, out, err = scripts.run("-n", 3, "early.py")
    assert sorted(out.splitlines()) == [f"[rank {rank}] {rank}" for rank in range(3)], err
    assert code == 0


def test_nothing_of_a_script_is_left_in_the_process(scripts):
    scripts.write("helper.py", "rank = None\n")
    scripts.write("train.py", TRAIN)
    before = list(sys.argv), list(sys.path), os.getcwd(), sys.modules["__main__"], sys.stdin, sys.stdout, os._exit
    scripts.run("-n", 2, "train.py")
    assert before == (
        list(sys.argv),
        list(sys.path),
        os.getcwd(),
        sys.modules["__main__"],
        sys.stdin,
        sys.stdout,
        os._exit,
    )
    assert "helper" not in sys.modules


MISSING = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    x = torch.ones(4)
    dist.all_reduce(x)
    if dist.get_rank() == 1:
        dist.broadcast(x, 0)
    else:
        dist.all_reduce(x)
"""
EARLY = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    for step in range(3 - dist.get_rank()):
        dist.all_reduce(torch.ones(4))
"""
RAISES = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("no data")
    dist.all_reduce(torch.ones(4))
"""


@pytest.mark.parametrize(
    ("script", "words"),
    [
        pytest.param(MISSING, "differ in the operation", id="mismatch"),
        pytest.param(EARLY, "rank 1 has returned and will not take part", id="early"),
        pytest.param(RAISES, "ValueError: no data", id="error"),
    ],
)
def test_a_verdict_names_rank_call_and_line(scripts, script, words):
    scripts.write("train.py", script)
    code, _, err = scripts.run("-n", 2, "train.py")
    assert code == 1
    assert words in err
    assert "train.py:" in err
    assert "runpy" not in err
    assert "pdlcheck/" not in err
    assert err.splitlines()[-1] == "replay: pdlcheck run -n 2 train.py"


def test_the_verdict_is_written_as_json(scripts):
    scripts.write("train.py", MISSING)
    scripts.run("-n", 2, "--json", "found.json", "train.py")
    found = json.loads((scripts.folder / "found.json").read_text())
    assert (found["error"], found["held"], found["fields"]["what"]) == ("CollectiveMismatch", False, "the operation")


def test_a_script_that_never_communicates_is_no_success(scripts):
    scripts.write("alone.py", "print('trained')\n")
    code, out, err = scripts.run("-n", 2, "alone.py")
    assert sorted(out.splitlines()) == ["[rank 0] trained", "[rank 1] trained"]
    assert code == 1
    assert err.startswith("nothing was checked: 2 ranks on sim ended, and none communicated; ")


EXITS = "import os, sys, torch.distributed as d; d.init_process_group('gloo'); d.barrier(); {}"


def test_an_exit_with_code_0_is_the_end_of_a_rank(scripts):
    scripts.write("ends.py", EXITS.format("sys.exit(0) if d.get_rank() else os._exit(0)"))
    assert scripts.run("-n", 2, "ends.py")[0] == 0


@pytest.mark.parametrize(
    ("exits", "words"),
    [
        ("d.get_rank() and sys.exit(3)", "the program ended with exit code 3"),
        ("d.get_rank() and os._exit(4)", "the program ended with exit code 4"),
        ("d.get_rank() and sys.exit('no data')", "no data"),
    ],
)
def test_another_exit_code_is_a_failure_of_its_rank(scripts, exits, words):
    scripts.write("ends.py", EXITS.format(exits))
    code, _, err = scripts.run("-n", 2, "ends.py")
    assert code == 1
    assert words in err
    assert "rank 1 of 2 raised this" in err


def test_a_script_that_asks_for_input_is_told_how_to_get_it(scripts):
    scripts.write("asks.py", "input('how many steps? ')\n")
    code, _, err = scripts.run("-n", 2, "asks.py")
    assert code == 1
    assert "ranks have no standard input; give the program its values as arguments, or in a file" in err


def test_wrong_arguments_of_a_script_are_shown(scripts):
    scripts.write("train.py", TRAIN)
    scripts.write("helper.py", "")
    code, _, err = scripts.run("-n", 2, "train.py", "--epochs", 1)
    assert code == 1
    assert "unrecognized arguments: --epochs 1" in err
    assert "ended with exit code 2" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nofile.py"], "there is no script nofile.py"),
        (["-m", "no.module"], "module no.module cannot be imported"),
        (["-m", "nomodule"], "there is no module nomodule"),
        (["--faults", "kill:1", "a.py"], "a fault is kill:RANK@OPERATION"),
        (["--world", "gloo", "--schedules", "9", "a.py"], "--schedules needs simulated ranks, and --world is gloo"),
        (["--schedule", "none", "a.py"], "schedule must be first"),
        (["--json", "no/such/folder/x.json", "a.py"], "cannot be written"),
    ],
)
def test_wrong_options_are_explained(scripts, words, message):
    scripts.write("a.py", "")
    code, _, err = scripts.run(*words)
    assert (code, message in err) == (2, True), err


RACE = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    if dist.get_rank():
        dist.send(torch.full((1,), float(dist.get_rank())), 0)
    else:
        first = dist.recv(torch.zeros(1))
        second = dist.recv(torch.zeros(1))
        assert (first, second) == (2, 1), "the ranks came in another order"
"""


def test_a_race_is_found_under_some_schedule_and_replayed(scripts):
    scripts.write("race.py", RACE)
    code, _, err = scripts.run("-n", 3, "--schedules", 8, "race.py")
    assert code == 1
    assert "the ranks came in another order" in err
    replay = err.splitlines()[-1].removeprefix("replay: pdlcheck run ").split()
    assert "--schedule" in replay
    assert scripts.run(*replay)[0] == 1
    assert scripts.run("-n", 3, "--schedule", "first", "race.py")[0] == 0


def test_a_killed_rank_is_named(scripts):
    scripts.write("helper.py", "")
    scripts.write("train.py", TRAIN)
    code, _, err = scripts.run("-n", 2, "--faults", "kill:1@2", "train.py")
    assert code == 1
    assert "rank 1 was killed by a fault when it was about to post" in err
    assert "rank 0 lost the connection" in err


def test_a_timeline_is_drawn(scripts):
    scripts.write("helper.py", "")
    scripts.write("train.py", TRAIN)
    _, _, err = scripts.run("-n", 2, "--timeline", "pictures", "train.py")
    assert (scripts.folder / "pictures" / "train.svg").read_text().startswith("<svg")
    assert "timeline: pictures/train.svg" in err


def test_a_cuda_script_runs_on_the_cpu(scripts):
    scripts.write(
        "cuda.py",
        """
        import os, torch, torch.distributed as dist
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        x = torch.ones(2, device="cuda")
        dist.all_reduce(x)
        assert x.tolist() == [2.0, 2.0]
        """,
    )
    code, _, err = scripts.run("-n", 2, "--cuda-as-cpu", "cuda.py")
    assert code == 0, err


def test_help_shows_the_command(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    assert "torchrun --nproc-per-node 4 -m pdlcheck run train.py" in capsys.readouterr().out


def test_the_documented_script_has_the_documented_verdict(scripts):
    text = (ROOT / "docs" / "running-scripts.md").read_text()
    script, shown = re.search(r"```python\n(# train.py\n.*?)```\n\n```text\n(.*?)```", text, re.DOTALL).groups()
    command, *lines = shown.splitlines()
    scripts.write("train.py", script)
    code, _, err = scripts.run(*command.removeprefix("$ pdlcheck run ").split())
    assert code == 1
    assert err.replace(f"{scripts.folder}/", "").splitlines() == lines
    assert "\n".join(lines[3:]) in (ROOT / "README.md").read_text()


SIZES = """
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data, targets = torch.randn(8, 3), torch.randn(8, 1)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = (model(data[rank::size]) - targets[rank::size]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        REDUCE
        optimizer.step()
        total = loss.detach() / size
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item():.4f}")
    if rank == 0:
        torch.save(model.module.state_dict(), "model.pt")
"""


def test_equal_results_on_several_numbers_of_ranks(scripts):
    scripts.write("train.py", SIZES.replace("REDUCE", "pass"))
    code, _, err = scripts.run("--compare-world-sizes", "1,2,4", "train.py")
    assert code == 0, err
    assert err.endswith("losses and weights agree on 1, 2, 4 ranks\n")


def test_a_loss_that_depends_on_the_number_of_ranks(scripts):
    scripts.write("train.py", SIZES.replace("REDUCE", "[p.grad.mul_(size) for p in model.parameters()]"))
    code, _, err = scripts.run("--compare-world-sizes", "1,2", "train.py")
    assert code == 1
    assert "'loss', printed for the 2. time, is " in err
    assert "on 2 ranks and" in err


def test_weights_that_depend_on_the_number_of_ranks(scripts):
    text = SIZES.replace("REDUCE", "[p.grad.mul_(size) for p in model.parameters()]").replace("print(f", "str(f")
    scripts.write("train.py", text)
    code, _, err = scripts.run("--compare-world-sizes", "1,2", "train.py")
    assert code == 1
    assert "model.pt: weight differs by " in err


def test_results_that_cannot_be_compared_are_no_success(scripts):
    scripts.write("silent.py", "import torch.distributed as d; d.init_process_group(); d.barrier()")
    code, _, err = scripts.run("--compare-world-sizes", "1,2", "silent.py")
    assert code == 1
    assert err.startswith("Inconclusive: nothing was compared: rank 0 printed no loss, and no rank called torch.save")
