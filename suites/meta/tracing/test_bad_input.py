"""Traces that cannot be compared, and arguments that cannot be right: each error says what to do."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

import pdlcheck
from pdlcheck.cli import main
from pdlcheck.extras import MissingExtra
from pdlcheck.tracing import Mapping, Positions, TraceError, compare_traces
from pdlcheck.worlds import get_world


def network(width: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))


def record(folder, model: nn.Module, samples: int = 4, steps: int = 1, made: int | None = None, **arguments) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pdlcheck.trace(model, optimizer, folder, steps=steps, **arguments):
        for _ in range(steps if made is None else made):
            optimizer.zero_grad()
            model(torch.linspace(-1, 1, samples * 4).view(samples, 4)).square().mean().backward()
            optimizer.step()


@pytest.fixture
def trusted(tmp_path):
    record(tmp_path / "trusted", network(), steps=2)
    return tmp_path / "trusted"


def refused(trusted, other, words: str, **arguments) -> None:
    with pytest.raises(TraceError, match=words):
        compare_traces(trusted, other, **arguments)


def test_a_run_agrees_with_itself(trusted):
    found = compare_traces(trusted, trusted)
    assert (found.first, found.steps, found.nearest, found.notes) == (None, 2, 0.0, [])


def test_a_directory_that_is_none(trusted, tmp_path):
    refused(trusted, tmp_path / "absent", "absent is no directory; give the directory that pdlcheck.trace wrote")
    (tmp_path / "empty").mkdir()
    refused(trusted, tmp_path / "empty", r"holds no file rank-\*.safetensors")


def test_another_model(trusted, tmp_path):
    torch.manual_seed(0)
    record(tmp_path / "other", nn.Sequential(nn.Identity(), nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(2, 2)))
    refused(trusted, tmp_path / "other", "lacks 0.weight, 0.bias of .*trusted: no rank has it under that name. The nea")
    refused(tmp_path / "other", trusted, "lacks 1.weight, 1.bias, 3.weight, 3.bias")
    record(tmp_path / "wide", network(8))
    refused(trusted, tmp_path / "wide", re.escape("0.weight in step 1: the pieces of the parallel run make (8, 4)"))


def test_another_number_of_samples(trusted, tmp_path):
    record(tmp_path / "more", network(), samples=8)
    refused(
        trusted, tmp_path / "more", "input in step 1: the parallel run has 8 elements along dimension 0 .the samples"
    )


def test_a_truncated_file(trusted, tmp_path):
    shutil.copytree(trusted, tmp_path / "cut")
    path = tmp_path / "cut" / "rank-0.safetensors"
    for length in (100, path.stat().st_size - 10):
        path.write_bytes(path.read_bytes()[:length])
        refused(trusted, tmp_path / "cut", "cannot be read .*: it is truncated or damaged; record it again")


def test_a_file_of_something_else(trusted, tmp_path):
    from safetensors.torch import save_file

    (tmp_path / "other").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "other" / "rank-0.safetensors")
    refused(trusted, tmp_path / "other", "is no trace of pdlcheck; record it again with pdlcheck.trace")
    header = {"pdlcheck_trace": "1", "header": "{}"}
    save_file({"a": torch.ones(2)}, tmp_path / "other" / "rank-0.safetensors", metadata=header)
    refused(trusted, tmp_path / "other", "has a damaged header")
    save_file({"a": torch.ones(2)}, tmp_path / "other" / "rank-0.safetensors", metadata={"pdlcheck_trace": "9"})
    refused(trusted, tmp_path / "other", "has format 9; this version reads 1")


def test_no_step(trusted, tmp_path):
    record(tmp_path / "none", network(), made=0)
    refused(trusted, tmp_path / "none", r"has no step: the optimizer's step\(\) never ran")


def test_fewer_steps_are_compared_with_a_note(trusted, tmp_path):
    record(tmp_path / "one", network(), steps=1)
    assert compare_traces(trusted, tmp_path / "one").notes == ["the traces have 2 and 1 steps; 1 were compared"]


def test_an_error_in_the_block_leaves_no_trace(tmp_path):
    record(tmp_path / "x", network())
    model = network()
    with (
        pytest.raises(RuntimeError, match="stop"),
        pdlcheck.trace(model, torch.optim.SGD(model.parameters()), tmp_path / "x"),
    ):
        raise RuntimeError("stop")
    assert list((tmp_path / "x").iterdir()) == []
    assert not model._forward_hooks


def of_ranks(folder, rules=None, ranks=None, **arguments) -> None:
    """Record a model whose first layer is split by hand."""
    at, of = dist.get_rank(), dist.get_world_size()
    whole, model = network(), network(6 // of)
    with torch.no_grad():
        model[0].weight.copy_(whole[0].weight.chunk(of)[at])
        model[0].bias.copy_(whole[0].bias.chunk(of)[at])
        model[2].weight.copy_(whole[2].weight.chunk(of, 1)[at])
    mapping = Mapping(rules or {}, ranks=ranks or {"tp": (at, of)}, **arguments)
    record(folder, model, mapping=mapping)


def recorded(folder, *arguments, **more):
    get_world("sim").run(of_ranks, folder, *arguments, world_size=2, **more)
    return folder


def test_a_mapping_that_misses_shards(trusted, tmp_path):
    other = recorded(tmp_path / "a")
    refused(trusted, other, re.escape('misses the shards of dimension 0: add the rule "0.weight": Shard(0)'))
    parameters = {"0.*": Shard(0), "2.weight": Shard(1)}
    other = recorded(tmp_path / "b", parameters)
    refused(trusted, other, re.escape('misses the shards of dimension 1: add the rule "0": Shard(1)'))


def test_a_mapping_that_misses_tensors(trusted, tmp_path):
    other = recorded(tmp_path / "a", rename=lambda name: name if name.startswith("0") else f"stage.{name}")
    refused(
        trusted, other, "lacks 2.weight, 2.bias .* no rank has it under that name. The nearest name is stage.2.weight"
    )
    other = recorded(tmp_path / "b", {"0.*": Shard(0)}, {"tp": (0, 2)})
    refused(trusted, other, "no rank has part 1 of 2 along tp; the mapping misses it")


def test_positions_that_do_not_fit(trusted, tmp_path):
    other = recorded(tmp_path / "a", {"0.*": Positions(0, [0, 1])})
    refused(trusted, other, "gives rank 0 2 positions for 3 elements along dimension 0")


def test_a_missing_rank_and_files_of_two_runs(trusted, tmp_path):
    other = recorded(tmp_path / "a")
    (other / "rank-1.safetensors").rename(tmp_path / "kept")
    refused(trusted, other, "lacks the file of rank 1 of 2: .* gather the files of all ranks in one directory")
    (tmp_path / "kept").rename(other / "rank-1.safetensors")
    shutil.copy(trusted / "rank-0.safetensors", other / "rank-0.safetensors")
    refused(trusted, other, "holds files of runs with 1 and 2 ranks; remove the directory and record again")


def test_a_smaller_run_removes_the_files_of_a_larger_one(tmp_path):
    folder = recorded(tmp_path / "a")
    record(folder, network())
    assert [path.name for path in folder.iterdir()] == ["rank-0.safetensors"]


def test_a_perturbed_run_in_the_wrong_place(trusted, tmp_path):
    record(tmp_path / "noisy", network(), steps=2, perturb=1)
    assert compare_traces(trusted, trusted, perturbed=tmp_path / "noisy").is_estimated
    refused(trusted, tmp_path / "noisy", "was recorded with perturb=; give it with --perturbed")
    refused(trusted, trusted, "was recorded without perturb=", perturbed=trusted)


@pytest.mark.parametrize(
    ("error", "words", "change"),
    [
        (TypeError, "model must be a torch.nn", {"model": torch.sin}),
        (TypeError, "optimizer must be a torch.optim", {"optimizer": 3}),
        (ValueError, "steps must be 1 or more, got 0", {"steps": 0}),
        (TypeError, "mapping must be a Mapping or a dict", {"mapping": [1]}),
        (TypeError, "use Shard, Replicate, Partial or Positions", {"mapping": {"0": "columns"}}),
        (ValueError, "at 2 of 2 on the axis tp; coordinates start at 0", {"mapping": Mapping(ranks={"tp": (2, 2)})}),
        (ValueError, "splits '0' over 'ep'; ranks= has only tp", {"mapping": {"0": {"ep": Shard(0)}}}),
        (ValueError, "no axis for it among dp", {"mapping": Mapping({"0": Shard(0)}, ranks={"dp": (0, 1)})}),
        (ValueError, "two parameters of this rank the name 'x'", {"mapping": Mapping(rename=lambda name: "x")}),
    ],
)
def test_arguments_that_cannot_be_right(tmp_path, error, words, change):
    model = network()
    arguments = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "directory": tmp_path} | change
    with pytest.raises(error, match=re.escape(words)), pdlcheck.trace(**arguments):
        pass


def perturbed_on_ranks(folder) -> None:
    record(folder, network(), perturb=1)


def test_ranks_are_not_perturbed(tmp_path):
    with pytest.raises(ValueError, match="perturb= needs a run of one process, got 2 ranks"):
        get_world("sim").run(perturbed_on_ranks, tmp_path, world_size=2)


def test_the_command_prints_the_first_place_and_its_exit_code(trusted, tmp_path, capsys):
    assert main(["compare-traces", str(trusted), str(trusted)]) == 0
    assert capsys.readouterr().out.startswith("the traces agree: ")
    model = network()
    model[2].register_forward_hook(lambda module, args, output: output * 2)
    record(tmp_path / "wrong", model, steps=2)
    assert main(["compare-traces", str(trusted), str(tmp_path / "wrong")]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("the traces part in step 1 at 2 (Linear), forward\n")
    assert "what rank 0 found is 2 times the trusted tensor: a scale differs" in printed
    assert main(["compare-traces", str(trusted), str(tmp_path / "wrong"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["first"]["place"]["module"] == "2"
    assert main(["compare-traces", str(trusted), str(tmp_path / "absent")]) == 2
    assert "pdlcheck compare-traces: " in capsys.readouterr().err


def test_without_safetensors_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.delitem(sys.modules, "pdlcheck.tracing.files")
    with pytest.raises(MissingExtra, match=re.escape("pip install 'pdlcheck[trace]'")):
        importlib.import_module("pdlcheck.tracing.files")
