"""State that torch keeps for the whole process is per-rank on simulated ranks: state dicts, context managers, hooks."""

from __future__ import annotations

import shutil
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from pdlcheck.errors import Unsupported
from pdlcheck.worlds import get_world

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns about its own older names


def made(*, wrap):
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    if wrap == "fsdp2":
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        return fully_shard(model, mesh=mesh)
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(
        nn.Sequential(FullyShardedDataParallel(model[0], device_id=cpu), model[1]), device_id=cpu
    )


def stepped(model):
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return optimizer


def sums(state):
    return {name: round(value.double().sum().item(), 5) for name, value in sorted(state.items())}


# -- state dicts -----------------------------------------------------------------------------------


def full_state_dict_of_fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    model = made(wrap="fsdp1")
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = model.state_dict()
        model.load_state_dict(state)
        return sums(state), sums(model.state_dict())


def sharded_state_dict_of_fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    model = made(wrap="fsdp1")
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = model.state_dict()
        model.load_state_dict(state)
    return sorted((name, tuple(value.size())) for name, value in state.items())


def state_dict_of_model_and_optimizer(wrap):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    model = made(wrap=wrap)
    optimizer = stepped(model)
    whole = StateDictOptions(full_state_dict=True)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=whole)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer, options=whole)
    return sums(of_model), sorted(of_optimizer["state"])


def of_fsdp1():
    return state_dict_of_model_and_optimizer("fsdp1")


def of_fsdp2():
    return state_dict_of_model_and_optimizer("fsdp2")


def weights_of_rank_0():
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    model = made(wrap="fsdp2")
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole if dist.get_rank() == 0 else {}, options=options)
    return sums(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))


def timeout_of_the_group():
    from datetime import timedelta

    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=50))
    return torch.device("cpu") in dist.group.WORLD._device_types


# -- context managers and hooks --------------------------------------------------------------------


def loss_over_a_sharded_vocabulary():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    head = parallelize_module(nn.Linear(8, 16), mesh, ColwiseParallel(use_local_output=False))
    inputs, targets = torch.randn(4, 8), torch.randint(0, 16, (4,))
    with loss_parallel():
        loss = F.cross_entropy(head(inputs), targets)
        loss.backward()
    refused = False
    try:
        F.cross_entropy(head(inputs), targets).backward()
    except RuntimeError:
        refused = True
    return round(loss.item(), 5), round(head.weight.grad.full_tensor().abs().sum().item(), 4), refused


def wrapped_in_a_context():
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import enable_wrap, wrap

    torch.manual_seed(0)
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, device_id=torch.device("cpu")):
        first = wrap(nn.Linear(4, 4))
        dist.barrier()
        model = nn.Sequential(first, wrap(nn.Linear(4, 4)))
    return [type(layer).__name__ for layer in [*model, wrap(nn.Linear(4, 4))]], model(torch.ones(1, 4)).tolist()


def communication_by_module():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with CommDebugMode() as counted:
        model(torch.ones(2, 8)).sum().backward()
    return counted.get_total_counts(), sorted(counted.comm_module_counts)


def global_hooks():
    from torch.optim.optimizer import register_optimizer_step_post_hook

    heard = []
    hook = nn.modules.module.register_module_forward_hook(lambda module, given, made: heard.append(dist.get_rank()))
    step = register_optimizer_step_post_hook(lambda *given: heard.append(dist.get_rank() + 10))
    model = nn.Linear(2, 2)
    for _ in range(3):
        dist.barrier()
        model(torch.ones(1, 2)).sum().backward()
        dist.barrier()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        if dist.get_rank():
            hook.remove()  # earlier than rank 0
    dist.barrier()
    hook.remove()
    step.remove()
    model(torch.ones(1, 2))
    return heard


PROGRAMS = [
    full_state_dict_of_fsdp1,
    sharded_state_dict_of_fsdp1,
    of_fsdp1,
    of_fsdp2,
    weights_of_rank_0,
    timeout_of_the_group,
    loss_over_a_sharded_vocabulary,
    wrapped_in_a_context,
    communication_by_module,
    global_hooks,
]


@pytest.fixture(scope="module")
def gloo():
    world = get_world("gloo")
    yield world
    world.close()


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_gives_the_same_on_simulated_ranks_as_on_processes(gloo, program, world_size):
    found = get_world("sim").run(program, world_size=world_size)
    assert repr(found) == repr(gloo.run(program, world_size=world_size))
    for seed in range(3):
        assert repr(get_world("sim", seed=seed).run(program, world_size=world_size)) == repr(found)


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_hook_that_is_left_behind_is_everybodys_until_it_is_removed(leaver):
    left, heard = [], []

    def leaves_a_hook():
        dist.barrier()
        if dist.get_rank() == leaver:
            left.append(nn.modules.module.register_module_forward_hook(lambda *given: heard.append(dist.get_rank())))
        for _ in range(3):
            nn.Linear(1, 1)(torch.ones(1))
            dist.barrier()

    def calls_a_module():
        nn.Linear(1, 1)(torch.ones(1))
        dist.barrier()

    sim = get_world("sim")
    sim.run(leaves_a_hook, world_size=2)
    assert heard == [leaver] * 3
    heard.clear()
    sim.run(calls_a_module, world_size=2)
    assert sorted(heard) == [0, 1]
    left[0].remove()
    sim.run(calls_a_module, world_size=2)
    assert sorted(heard) == [0, 1]


def test_a_context_of_a_function_scoped_fixture_is_that_of_its_rank(pytester):
    pytester.makepyfile(
        """
        import pytest
        import torch.distributed as dist
        from torch import nn
        from torch.nn.modules.module import register_module_forward_hook

        @pytest.fixture
        def heard(rank):
            calls = []
            hook = register_module_forward_hook(lambda *given: calls.append(dist.get_rank()))
            yield calls
            hook.remove()

        @pytest.mark.world_size(2)
        def test_a_rank_calls_its_own_module(heard, rank):
            dist.barrier()
            nn.Identity()(rank)
            assert rank in heard
        """
    )
    pytester.runpytest_inprocess("--world", "sim,gloo").assert_outcomes(passed=2)


# -- what simulated ranks cannot do ----------------------------------------------------------------


def profiled(who):
    def multiply():
        total = torch.ones(8)
        dist.all_reduce(total)
        return (total @ total).item()

    if dist.get_rank() not in who:
        return multiply()
    with torch.profiler.profile() as profile:
        product = multiply()
    assert any("dot" in event.key for event in profile.key_averages())
    return product


def test_a_second_rank_that_profiles_beside_the_first_is_told_so():
    with pytest.raises(Unsupported, match=r"rank \d starts torch's profiler, at .*test_torchs_own.py:\d+, ") as refused:
        get_world("sim").run(profiled, (0, 1), world_size=2)
    assert "profile on one rank at a time, or test this on processes, with --world gloo" in str(refused.value)


def test_one_rank_may_profile_and_so_may_all_on_processes(gloo):
    for _ in range(2):
        assert get_world("sim").run(profiled, (1,), world_size=2) == [32.0, 32.0]
    assert gloo.run(profiled, (0, 1), world_size=2) == [32.0, 32.0]


def saved_in_the_background():
    import torch.distributed.checkpoint as dcp

    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(path)
    try:
        dcp.async_save(made(wrap="fsdp2").state_dict(), checkpoint_id=path[0]).result()
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(path[0], ignore_errors=True)


def test_a_checkpoint_saved_by_a_thread_is_refused_with_the_users_line(gloo):
    gloo.run(saved_in_the_background, world_size=2)
    with pytest.raises(Unsupported, match=r"a thread that rank \d started communicates, at .*test_torchs_own.py:\d+;"):
        get_world("sim").run(saved_in_the_background, world_size=2)
