"""Programs that fail if ranks share module globals, each with its correct twin, and programs that only look so.

The tests copy this file and import the copy, as a user's module.
"""

import functools
import itertools
import logging
import threading
import types

import torch
import torch.distributed as dist

step_count = 0
steps_done = 0
losses = []
cache = {}
seen = []
limit = 0
ids = itertools.count()
weights = torch.zeros(3)
options = types.SimpleNamespace(verbose=False)
_model = None
torch.manual_seed(0)  # without the seed, numbers drawn at import would differ on processes, which is another matter
net = torch.nn.Linear(2, 1)
deep = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
for parameter in deep.parameters():
    torch.nn.init.constant_(parameter, 0.25)
ready = False
__hidden = 0
# constants of kinds that cannot be read as plain bytes
sparse = torch.eye(2).to_sparse()
shapes_alone = torch.zeros(2, device="meta")
conjugate = torch.tensor([1 + 1j]).conj()


class Trainer:
    steps = 0

    def __init__(self):
        self.own_steps = 0


trainer = Trainer()


def counter():
    global step_count
    for _ in range(3):
        step_count += 1
        dist.barrier()
    return step_count


def counter_of_its_own():
    count = 0
    for _ in range(3):
        count += 1
        dist.barrier()
    return count


def cached():
    if "shard" not in cache:
        cache["shard"] = [dist.get_rank()]
    dist.barrier()
    return cache["shard"]


def cached_by_rank():
    key = "shard", dist.get_rank()
    if key not in cache:
        cache[key] = [dist.get_rank()]
    dist.barrier()
    return cache[key]


def singleton():
    global _model
    if _model is None:
        _model = torch.full((2,), float(dist.get_rank()))
    dist.barrier()
    return _model


def built_anew():
    dist.barrier()
    return torch.full((2,), float(dist.get_rank()))


def class_attribute():
    Trainer.steps += 1
    dist.barrier()
    return Trainer.steps


def instance_attribute():
    mine = Trainer()
    mine.own_steps += 1
    dist.barrier()
    return mine.own_steps


@functools.lru_cache
def load(name):
    return [name, dist.get_rank()]


@functools.lru_cache
def load_for(name, rank):
    return [name, rank]


def lru_cached():
    return load("shard")


def lru_cached_by_rank():
    return load_for("shard", dist.get_rank())


def collect(item, into=[]):  # noqa: B006
    into.append(item)
    return list(into)


def collect_anew(item, into=None):
    into = [] if into is None else into
    into.append(item)
    return list(into)


def mutable_default():
    collect(dist.get_rank())
    dist.barrier()
    return collect(-1)


def default_of_none():
    collect_anew(dist.get_rank())
    dist.barrier()
    return collect_anew(-1)


def appended_by_one():
    if dist.get_rank() == 0:
        seen.append("batch")
    dist.barrier()
    return len(seen)


def sent_by_one():
    sent = [["batch"] if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(sent)
    return len(sent[0])


def rebound():
    global limit
    if dist.get_rank() == 0:
        limit = 10
    dist.barrier()
    return limit


def told_to_all():
    number = torch.tensor(10 if dist.get_rank() == 0 else 0)
    dist.broadcast(number, 0)
    return number.item()


def numbered():
    dist.barrier()
    return next(ids)


def updated():
    weights.add_(1.0)
    dist.barrier()
    return weights.tolist()


def trained():
    """Train a global model; ranks that share one model add up their gradients."""
    net(torch.ones(2)).sum().backward()
    dist.barrier()
    return net.weight.grad.tolist()


def hidden():
    global __hidden
    __hidden += dist.get_rank() + 1
    dist.barrier()
    return __hidden


def flagged():
    """Set the same value on each rank; only the first one does the work."""
    global ready
    worked = not ready
    ready = True
    dist.barrier()
    return worked


def on_a_global_object():
    trainer.own_steps += 1
    dist.barrier()
    return trainer.own_steps


def remembering(function):
    known = {}

    @functools.wraps(function)
    def wrapper(name):
        if name not in known:
            known[name] = function(name)
        return known[name]

    return wrapper


@remembering
def read(name):
    return [name, dist.get_rank()]


def enclosed():
    return read("shard")


def on_a_function():
    enclosed.calls = getattr(enclosed, "calls", 0) + 1
    dist.barrier()
    return enclosed.calls


def counter_among_innocents():
    """Change many globals, of which only one matters."""
    global steps_done, epochs
    epochs = 3
    options.colour = not getattr(options, "colour", False)
    losses.append(0.5)
    Trainer.best = 0.5
    steps_done += 1
    dist.barrier()
    return steps_done


def trained_by_ddp():
    """Train a global model by DDP.

    Simulated ranks refuse it, because torch locks the gradients of the single model for one of them.
    """
    model = torch.nn.parallel.DistributedDataParallel(deep)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 2) * (dist.get_rank() + 1)).sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in deep.parameters()]


def constant():
    global batch_size
    batch_size = 32
    dist.barrier()
    return batch_size


def option():
    options.verbose = True
    dist.barrier()
    return options.verbose


def logging_set_up():
    logger = logging.getLogger("train")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
    logger.setLevel(logging.INFO)
    dist.barrier()
    return logger.level


def imported_late():
    import train_late

    dist.barrier()
    return train_late.NAME


def imported_late_and_counted():
    import train_late

    train_late.uses += 1
    dist.barrier()
    return train_late.uses


_of_thread = threading.local()


def by_thread():
    _of_thread.count = getattr(_of_thread, "count", 0) + 1
    dist.barrier()
    return _of_thread.count


BROKEN = [  # with the global to blame, and the correct twin
    (counter, "train.step_count  int, changed by ranks 0 and 1", counter_of_its_own),
    (cached, "train.cache  dict, changed by ranks 0 and 1", cached_by_rank),
    (singleton, "train._model  Tensor, changed by ranks 0 and 1", built_anew),
    (class_attribute, "train.Trainer.steps  int, changed by ranks 0 and 1", instance_attribute),
    (lru_cached, "train.load  lru_cache, changed by ranks 0 and 1", lru_cached_by_rank),
    (mutable_default, "train.collect(into=...)  list, changed by ranks 0 and 1", default_of_none),
    (appended_by_one, "train.seen  list, changed by rank 0", sent_by_one),
    (rebound, "train.limit  int, changed by rank 0", told_to_all),
]
ALSO_BROKEN = [
    (numbered, "train.ids  count, changed by ranks 0 and 1"),
    (updated, "train.weights  Tensor, changed by ranks 0 and 1"),
    (trained, "train.net  Linear, changed by ranks 0 and 1"),
    (flagged, "train.ready  bool, changed by ranks 0 and 1"),
    (hidden, "train.__hidden  int, changed by ranks 0 and 1"),
    (on_a_global_object, "train.trainer.own_steps  int, changed by ranks 0 and 1"),
    (enclosed, "train.read's known  dict, changed by ranks 0 and 1"),
    (on_a_function, "train.enclosed.calls  int, changed by ranks 0 and 1"),
    (counter_among_innocents, "train.steps_done  int, changed by ranks 0 and 1"),
    (imported_late_and_counted, "train_late  module, changed by ranks 0 and 1"),
]
INNOCENT = [constant, option, logging_set_up, imported_late, by_thread]
