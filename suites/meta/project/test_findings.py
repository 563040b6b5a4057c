"""Findings of pdlcheck in third-party code: each finding replays, and the cure on its page passes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from functools import partial

import pytest
import torch

from pdlcheck.errors import BufferHazard, CheckFailed, CollectiveMismatch, Deadlock
from pdlcheck.worlds import get_world

from ..clone import ROOT

FINDINGS = ROOT / "docs" / "findings"

pytestmark = pytest.mark.skipif(
    not FINDINGS.exists(), reason="needs docs/findings: run the suites in a clone of the repository"
)


def _module(name):
    spec = importlib.util.spec_from_file_location(name, FINDINGS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def powersgd():
    return _module("powersgd_order")


@pytest.mark.parametrize("schedule", ["first", *(f"random:{seed}" for seed in range(8))])
def test_powersgd_with_two_buckets_reduces_in_another_order_on_each_rank(powersgd, schedule):
    with pytest.raises((CollectiveMismatch, Deadlock), match=r"all_reduce\(SUM\) of float32 \(8,\)"):
        get_world("sim", schedule=schedule).run(powersgd.train, powersgd.torchs_hook, world_size=2)


@pytest.mark.parametrize("schedule", ["first", *(f"random:{seed}" for seed in range(8))])
def test_powersgd_that_waits_bucket_by_bucket_keeps_replicas_equal(powersgd, schedule):
    one, other = get_world("sim", schedule=schedule).run(powersgd.train, powersgd.waited_hook, world_size=2)
    assert torch.equal(one, other)


def test_powersgd_with_one_bucket_keeps_replicas_equal(powersgd, monkeypatch):
    monkeypatch.setattr(powersgd, "LAYERS", 1)
    one, other = get_world("sim").run(powersgd.train, powersgd.torchs_hook, world_size=2)
    assert torch.equal(one, other)


def test_a_wait_for_the_last_of_several_is_a_hazard_but_on_a_stream():
    program = _module("last_of_several").times_unfinished
    with pytest.raises(BufferHazard, match=r"reads the output .*last_of_several.py:31"):
        get_world("sim").run(program, world_size=2)
    for semantics, waits_for_all in (("nccl", False), ("rendezvous", True), ("gloo", True)):
        world = get_world("sim", semantics=semantics)
        assert world.run(program, waits_for_all, 8, world_size=2) == [0, 0]


def test_a_wait_for_all_of_several_is_right_on_gloo():
    world = get_world("gloo", watch=False)
    try:
        assert world.run(_module("last_of_several").times_unfinished, True, world_size=2) == [0, 0]
    finally:
        world.close()


def test_subgroups_of_a_group_are_other_groups_on_each_half():
    program = _module("subgroups_of_a_group").sum_over_pair
    with pytest.raises(CollectiveMismatch, match=r"(?s)make different groups: new_group.*subgroups_of_a_group.py:22"):
        get_world("sim").run(program, world_size=8)
    assert get_world("sim").run(program, True, world_size=8) == [1.0, 1.0, 5.0, 5.0, 9.0, 9.0, 13.0, 13.0]


def polled(measure, threads, policy):
    """Return the number of timed calls, the threads' policies, and whether gloo's thread exists and took time."""
    took, spent = measure(policy, 20)
    policies = {os.sched_getscheduler(thread) for thread in threads()}
    return len(took), policies, bool(threads("gloo_tcp_loop")), spent > 0


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="needs Linux: its policies of scheduling")
@pytest.mark.parametrize("policy", ["SCHED_OTHER", "SCHED_BATCH"])
def test_gloos_thread_for_connections_is_measured_under_either_policy(policy):
    program, world = _module("gloo_polls"), get_world("gloo", watch=False)
    try:
        for calls, policies, is_named, took_time in world.run(
            polled, program.measure, program.threads, policy, world_size=2
        ):
            assert (calls, policies) == (20, {getattr(os, policy)})
            assert took_time == is_named  # gloo has named it since torch 2.13
    finally:
        world.close()


def library_module(name, **versions):
    """Return the program of a finding, or skip the test where a library lacks or has another version."""
    for library, version in versions.items():
        project = library.replace("_", "-")
        try:
            found = importlib.metadata.version(project)
        except importlib.metadata.PackageNotFoundError:
            found = None
        if found != version:
            pytest.skip(f"the finding is one of {project} {version}: pip install {project}=={version}")
    return _module(name)


@pytest.mark.filterwarnings("ignore")
def test_torchmetrics_nrmse_depends_on_the_number_of_ranks():
    program = library_module("torchmetrics_nrmse", torchmetrics="1.9.0")
    with pytest.raises(CheckFailed, match=r"reports 0\.2068965 at \[0\], one process on all 6 samples reports 0\.25"):
        program.check()
    with pytest.raises(IndexError):
        program.check(num_outputs=1)
    program.check(world_sizes=(2,))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["PearsonCorrCoef", "ConcordanceCorrCoef"])
@pytest.mark.parametrize("samples", ["BY_CLASS", "ONE_EACH"])
def test_torchmetrics_correlation_is_nan_for_constant_ranks(name, samples):
    program = library_module("torchmetrics_pearson", torchmetrics="1.9.0")
    with pytest.raises(CheckFailed, match="rank 0 reports nan, one process"):
        program.check(getattr(program, samples), name)


@pytest.mark.filterwarnings("ignore")
def test_torchmetrics_states_cannot_be_synchronised():
    program = library_module("torchmetrics_states", torchmetrics="1.9.0")
    with pytest.raises(RuntimeError, match="could not infer output dtype"):
        get_world("sim").run(program.exact_match, world_size=2)
    with pytest.raises(CollectiveMismatch, match="differ in the dtype: int64 and float32"):
        get_world("sim").run(program.no_batch, world_size=2)
    assert get_world("sim").run(program.no_batch, True, world_size=2) == [1.0, 1.0]


@pytest.mark.filterwarnings("ignore")
def test_accelerate_keeps_repeated_samples_of_a_sized_stream():
    program = library_module("accelerate_sized_stream", accelerate="1.15.0")
    with pytest.raises(CheckFailed, match="the first sample counts twice, as a sampler pads to 12"):
        program.check()
    program.check(partial(program.evaluate, streamed=False))
    program.check(partial(program.evaluate, dispatch_batches=True))


@pytest.mark.filterwarnings("ignore")
def test_accelerate_resumes_a_dispatched_split_loader_too_early():
    program = library_module("accelerate_split_resume", accelerate="1.15.0", torchdata="0.11.0")
    with pytest.raises(CheckFailed, match=r"\['_sampler_iter_yielded'\] is 0 instead of 3"):
        program.check()
    program.check(partial(program.start, split_batches=False))


def test_the_backward_pass_of_all_gather_mixes_up_ranks_of_the_group_and_of_the_job():
    program = _module("all_gather_backward")
    with pytest.raises(ValueError, match="Global rank 0 is not part of group"):
        get_world("sim").run(program.gradient, world_size=4)
    assert get_world("sim").run(program.gradient, False, world_size=4) == [[4.0, 4.0]] * 4


@pytest.mark.filterwarnings("ignore")
def test_torchdata_skips_the_epoch_after_a_checkpoint_at_the_end_of_one():
    program = library_module("torchdata_epoch_end", torchdata="0.11.0")
    with pytest.raises(CheckFailed, match=r"\(28 in all\) in no shard"):
        program.check()
    program.check(partial(program.resumed_epoch, stateful=False))


@pytest.mark.filterwarnings("ignore")
def test_pytorch_metric_learning_scales_gradients_of_proxies_by_the_number_of_ranks():
    program = library_module("proxies_gradient", pytorch_metric_learning="2.9.0")
    with pytest.raises(CheckFailed, match=r"of 'loss.W'[\s\S]*world_size = 2 times too large"):
        program.check()
    program.check("ContrastiveLoss")


@pytest.mark.filterwarnings("ignore")
def test_ignite_seeds_all_ranks_alike_for_a_users_sampler(monkeypatch):
    program = library_module("ignite_sampler_seed", pytorch_ignite="0.5.5")
    with pytest.raises(CheckFailed, match=r"ranks 0 and 1 draw the same random numbers.*aten.bernoulli_"):
        program.check()
    program.check(partial(program.make, weighted=False))
    order = program.DistributedProxySampler.__iter__

    def drawn_apart(sampler):
        with torch.random.fork_rng(devices=[]):
            return order(sampler)

    monkeypatch.setattr(program.DistributedProxySampler, "__iter__", drawn_apart)
    program.check()


@pytest.mark.filterwarnings("ignore")
def test_pylate_scales_gradients_by_the_number_of_ranks(monkeypatch):
    program = library_module("pylate_gradient", pylate="1.6.0")
    with pytest.raises(CheckFailed, match="world_size = 2 times too large"):
        program.check()
    monkeypatch.setattr("pylate.losses.contrastive.get_world_size", lambda: 1)
    program.check()


@pytest.mark.filterwarnings("ignore")
def test_flagembedding_divides_gradients_by_the_number_of_ranks():
    program = library_module("flagembedding_gradient", FlagEmbedding="1.4.2")
    with pytest.raises(CheckFailed, match=r"world_size = 2 times too small.*a gather in the loss cuts the way back"):
        program.check()
    program.check(program.scaled)


@pytest.mark.filterwarnings("ignore")
def test_transformers_resumes_a_later_epoch_in_the_order_of_the_first(monkeypatch):
    program = library_module("transformers_resume_order", transformers="5.24.0", accelerate="1.15.0")
    with pytest.raises(CheckFailed, match=r"sample 4 is in the shards of ranks \[0, 1\][\s\S]*3 samples more"):
        program.check()
    program.check(world_size=1)
    program.check(partial(program.resumed_epoch, strategy="random"))
    sampler = "accelerate.data_loader.BatchSamplerShard.set_epoch"
    monkeypatch.setattr(sampler, lambda self, epoch: self.batch_sampler.set_epoch(epoch), raising=False)
    program.check()


@pytest.mark.filterwarnings("ignore")
def test_deepspeed_adds_up_gradients_of_different_parameters():
    program = library_module("deepspeed_branches", deepspeed="0.19.8")
    with pytest.raises(CheckFailed, match=r"after 1 step.*parameter 'layers.0.weight', one_process holds"):
        program.check()
    program.check(partial(program.train, stage=0))
    program.check(partial(program.train, same_branch=True), partial(program.one_process, same_branch=True))


@pytest.mark.filterwarnings("ignore")
def test_streaming_gives_ranks_different_numbers_of_batches():
    program = library_module("streaming_device_batches", mosaicml_streaming="0.13.0")
    with pytest.raises(CheckFailed, match=r"the shards have \[12, 8\] samples, they may differ by 0"):
        program.check()
    program.check("per_stream")


@pytest.mark.filterwarnings("ignore")
def test_webdataset_reads_the_shards_in_the_same_order_in_every_epoch():
    program = library_module("webdataset_shard_order", webdataset="1.0.2")
    with pytest.raises(CheckFailed, match=r"rank 0 has samples .* \(48 in all\) in epochs 0 and 1"):
        program.check()
    program.check(detshuffle=True)
